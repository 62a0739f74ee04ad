"""`areal view [RUNS]`: runs in a browser, from their stores; `--bundle DIR` writes the same as files.

Listens on loopback by default; beyond it, the printed address has a token. Ctrl-C and SIGTERM end it with code 0.
"""

import argparse
import asyncio
import signal
from pathlib import Path

from areal.api.errors import ConfigError
from areal.config.errors import require
from areal.store.filters import parse_filter
from areal.viewer.app import Viewer
from areal.viewer.bundle import write_bundle
from areal.viewer.server import serve


def run(args: argparse.Namespace) -> int:
    places = [Path(each) for each in args.runs]
    for place in places:
        if not place.is_dir():
            raise ConfigError(f"areal view needs directories, {place} is none; give a run, or what output_dir names")
    if args.bundle is not None:
        require(args.episodes >= 1, f"--episodes must be >= 1, got {args.episodes}")
        written = write_bundle(Viewer(places).runs, Path(args.bundle), parse_filter(args.filter), args.episodes)
        print(f"{written:,} pages; open {Path(args.bundle) / 'index.html'}")
        return 0
    asyncio.run(_serve(places, args.host, args.port))
    return 0


async def _serve(places: list[Path], host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(Viewer(places).asgi(), host, port, stop, _announce)


def _announce(url: str) -> None:
    print(f"areal view at {url} (Ctrl-C ends it)", flush=True)
