"""A base for what is used in a `with` block and closed at its end."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """`with Thing() as thing: ...` calls `thing.close()` however the block ends."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
