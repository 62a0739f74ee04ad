"""`python -m areal.viewer RUN HOST PORT`: the viewer beside a run that trains, started by its driver.

It prints its address, gives way to everything else that computes, and ends when its input does: with the driver,
however that ends.
"""

import asyncio
import os
import sys
from pathlib import Path

from areal.api.errors import ArealError
from areal.viewer.app import Viewer
from areal.viewer.server import serve

YIELDING = 15
"""Its niceness: training goes first."""


def main(directory: str, host: str, port: str) -> int:
    os.nice(YIELDING)
    try:
        asyncio.run(_serve(Path(directory), host, int(port)))
    except ArealError as error:
        print(f"areal: {error}", flush=True)
        return 2
    return 0


async def _serve(directory: Path, host: str, port: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, _read, stop)
    await serve(Viewer([directory]).asgi(), host, port, stop, lambda url: print(url, flush=True))


def _read(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        stop.set()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
