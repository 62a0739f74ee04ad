"""Which calls of a batch may still begin: a pipe with one byte for each, that both sides can read.

The kernel gives a byte to exactly one reader. A worker takes one before it begins a call; its parent takes what is left
and from then on knows what was begun, also in a worker that hangs or is dead.
"""

import os


class Tickets:
    def __init__(self, read_fd: int, write_fd: int | None = None) -> None:
        """A worker has no `write_fd`."""
        self.read_fd = read_fd
        self._write_fd = write_fd

    @classmethod
    def new(cls) -> "Tickets":
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        return cls(read_fd, write_fd)

    def put(self, count: int) -> None:
        assert self._write_fd is not None
        if count:
            os.write(self._write_fd, bytes(count))

    def take(self, at_most: int) -> int:
        """How many it got."""
        try:
            return len(os.read(self.read_fd, at_most))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self.read_fd)
        if self._write_fd is not None:
            os.close(self._write_fd)
