"""Published weights on a host that does not have all files: fetched from where they are, once for all engines there.

They are with the driver, or each with the rank that wrote it. What a rank of the same host wrote is copied.

A version goes into one of two directories, by turns, and in place: engines have mapped the files of the version before
the last, which have the same names and sizes. Beside each directory a note says which shards it has or is getting. So
a shard that did not change is not fetched again, and a fetch that was broken off goes on where it stopped.

Invariants:
- Whoever writes into a directory holds its lock. The kernel frees the lock of a process that dies, and the next one
  goes on with what that one had fetched.
- What is noted as whole was written completely. That its bytes are right is for the engine to say, which compares
  digests before it uses anything; `fetch(distrust=True)` then compares every piece with its source's.
- All of it happens on an event loop in a thread of its own: that of an engine computes, and turns only between two
  decode steps.
- A fetch waits for the next piece, not for its end: it may take as long as pieces arrive.
"""

import asyncio
import fcntl
import json
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal.api.engine_api import WeightShard, WeightUpdate
from areal.api.errors import ArealError, WeightMismatch
from areal.infra.rpc.channel import Channel, ChannelClosed
from areal.infra.rpc.shipping import PIECE_BYTES, PIECE_SECONDS, READ_WEIGHTS, digest_of_piece

IN_FLIGHT = 8
"""Pieces that are asked for at the same time: while one travels, others are read, sealed, checked and written."""
MOST_CONNECTIONS = 3
"""For one version: a connection that breaks is made again."""
LOOK_SECONDS = 1.0
"""How often one who waits for a neighbour looks whether that makes progress."""
NEIGHBOUR_SECONDS = 30.0
"""After so long without progress of a neighbour, an engine fetches the weights for itself alone."""


class HostWeights:
    """An engine's access to the weights of its host."""

    def __init__(
        self,
        shared: Path,
        own: Path,
        connect: Callable[[str], Awaitable[Channel]],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`shared` is the same directory for all engines of the run on this host, `own` that of this one alone.

        `connect` takes a shard's source and is called in the other thread. `on_progress` is called on the caller's
        event loop, as often as pieces arrive.
        """
        self._places = (shared, own)
        self._connect = connect
        self._on_progress = on_progress
        self._loop: asyncio.AbstractEventLoop | None = None

    async def fetch(self, update: WeightUpdate, *, distrust: bool = False) -> WeightUpdate:
        """The same weights in a directory of this host. `distrust`: what is there has been found to be wrong."""
        if not update.path or all(_is_here(update, shard) for shard in update.shards):
            return update
        caller = asyncio.get_running_loop()

        def report() -> None:
            with suppress(RuntimeError):  # the caller's loop has ended
                caller.call_soon_threadsafe(self._on_progress)

        fetching = asyncio.run_coroutine_threadsafe(self._fetch(update, distrust, report), self._own_loop())
        return await asyncio.wrap_future(fetching)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="areal weights", daemon=True).start()
        return self._loop

    async def _fetch(self, update: WeightUpdate, distrust: bool, report: Callable[[], None]) -> WeightUpdate:
        shared, own = self._places
        try:
            slot = await self._fill(shared, update, distrust, report)
        except _NeighbourStuck:
            slot = await self._fill(own, update, distrust, report)
        return replace(update, path=str(slot))

    async def _fill(self, place: Path, update: WeightUpdate, distrust: bool, report: Callable[[], None]) -> Path:
        slot, other = _Slot(place, update.version % 2), _Slot(place, (update.version + 1) % 2)
        async with _lock(slot, report):
            slot.begin(update)
            if distrust:
                slot.doubt()
            for shard in update.shards:
                here = Path(update.path) if _is_here(update, shard) else None
                if here is None and not distrust and other.has_whole(shard):
                    here = other.directory
                if here is not None and not slot.has_whole(shard):
                    slot.copy(shard, here)
                    report()
            sources = sorted({shard.source for shard in update.shards})
            await _together(self._fetch_from(source, update, slot, report) for source in sources)
        return slot.directory

    async def _fetch_from(self, source: str, update: WeightUpdate, slot: "_Slot", report: Callable[[], None]) -> None:
        """All shards of one source that are missing."""
        for connection in range(1, MOST_CONNECTIONS + 1):
            missing = [shard for shard in update.shards if shard.source == source and not slot.has_whole(shard)]
            if not missing:
                return
            try:
                await self._fetch_missing(update.version, missing, slot, report)
            except ChannelClosed:
                if connection == MOST_CONNECTIONS:
                    raise

    async def _fetch_missing(
        self, version: int, missing: list[WeightShard], slot: "_Slot", report: Callable[[], None]
    ) -> None:
        channel = await self._connect(missing[0].source)
        try:
            await _Fetch(channel, version, missing, slot, report).run()
        finally:
            await channel.close()


@dataclass(frozen=True)
class _Held:
    """What a file holds."""

    digest: str
    """Of the shard that it holds, or is getting."""
    whole: bool


class _Slot:
    """One of the two directories, and the note beside it. Only who has its lock may change it."""

    def __init__(self, place: Path, number: int) -> None:
        self.directory = place / f"weights-{number}"
        self.lock_path = place / f"weights-{number}.lock"
        self._note = place / f"weights-{number}.json"
        self.version = -1
        """Whose shards it has or is getting."""
        self.held: dict[str, _Held] = {}
        self._read_note()

    def begin(self, update: WeightUpdate) -> None:
        """From now on it is for this version; what belongs to none of its shards goes away."""
        self._read_note()  # who had the lock before has changed it
        if self.version > update.version:
            raise WeightMismatch(
                f"version {update.version} cannot be fetched any more; version {self.version} has been, in its place"
            )
        self.directory.mkdir(mode=0o700, exist_ok=True)
        names = {shard.name for shard in update.shards}
        for path in self.directory.iterdir():
            if path.name not in names:
                path.unlink()
        self.version = update.version
        self.held = {name: held for name, held in self.held.items() if name in names}
        self._write_note()

    def note(self, shard: WeightShard, *, whole: bool) -> None:
        self.held[shard.name] = _Held(shard.digest, whole)
        self._write_note()

    def doubt(self) -> None:
        """Something in it has been found to be wrong: no shard counts as whole."""
        self.held = {name: replace(held, whole=False) for name, held in self.held.items()}
        self._write_note()

    def has_part(self, shard: WeightShard) -> bool:
        return self.held.get(shard.name) == _Held(shard.digest, False)

    def has_whole(self, shard: WeightShard) -> bool:
        return self.held.get(shard.name) == _Held(shard.digest, True)

    def copy(self, shard: WeightShard, directory: Path) -> None:
        self.note(shard, whole=False)
        with open(directory / shard.name, "rb") as source, open(self.open(shard), "wb") as target:
            shutil.copyfileobj(source, target, PIECE_BYTES)
        self.note(shard, whole=True)

    def open(self, shard: WeightShard) -> int:
        """A descriptor of the file, with all its room: what is written in part would have holes, and the kernel kills
        whoever reads one in a mapping of a full file system (SIGBUS)."""
        descriptor = os.open(self.directory / shard.name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, shard.size_bytes)
            os.truncate(descriptor, shard.size_bytes)
        except OSError as error:
            os.close(descriptor)
            raise ArealError(
                f"{self.directory.parent} on {socket.gethostname()} must have room for two versions of the published "
                f"weights, of which {shard.name} has {shard.size_bytes:,} bytes: {error.strerror}; remove what is not "
                "needed there, or make it larger"
            ) from None
        return descriptor

    def last_write(self) -> int:
        """When anything in it was written, in the file system's nanoseconds."""
        with suppress(OSError):
            return max((entry.stat().st_mtime_ns for entry in os.scandir(self.directory)), default=0)
        return 0

    def _read_note(self) -> None:
        with suppress(FileNotFoundError):
            note = json.loads(self._note.read_text(encoding="utf-8"))
            self.version = note["version"]
            self.held = {name: _Held(digest, whole) for name, (digest, whole) in note["shards"].items()}

    def _write_note(self) -> None:
        shards = {name: [held.digest, held.whole] for name, held in self.held.items()}
        new = self._note.with_suffix(".new")
        new.write_text(json.dumps({"version": self.version, "shards": shards}), encoding="utf-8")
        os.replace(new, self._note)  # a process may die at any moment


class _Fetch:
    """The missing shards of one version on their way, over one connection."""

    def __init__(
        self, channel: Channel, version: int, missing: list[WeightShard], slot: _Slot, report: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._version = version
        self._missing = missing
        self._slot = slot
        self._report = report
        self._compared = {shard.name for shard in missing if slot.has_part(shard)}
        """Shards some of whose pieces may be here: the driver is told their digests, and sends those that differ."""
        self._descriptors: dict[str, int] = {}
        self._unfetched = {shard.name: -(-shard.size_bytes // PIECE_BYTES) for shard in missing}
        """Pieces of each shard."""

    async def run(self) -> None:
        pieces = self._pieces()
        try:
            await _together(self._take(pieces) for _ in range(IN_FLIGHT))
        finally:
            for descriptor in self._descriptors.values():
                os.close(descriptor)

    def _pieces(self) -> Iterator[tuple[WeightShard, int]]:
        for shard in self._missing:
            for start in range(0, shard.size_bytes, PIECE_BYTES):
                yield shard, start

    async def _take(self, pieces: Iterator[tuple[WeightShard, int]]) -> None:
        for shard, start in pieces:
            descriptor = self._descriptor(shard)
            compared = shard.name in self._compared
            have = digest_of_piece(os.pread(descriptor, PIECE_BYTES, start)) if compared else ""
            piece: bytes | None = await self._channel.call(
                READ_WEIGHTS, self._version, shard.name, start, have, timeout_seconds=PIECE_SECONDS
            )
            if piece is not None:
                if len(piece) != min(PIECE_BYTES, shard.size_bytes - start):
                    raise WeightMismatch(
                        f"{shard.name} of version {self._version} ends after {start + len(piece)} of "
                        f"{shard.size_bytes} bytes"
                    )
                _write(descriptor, piece, start)
            self._unfetched[shard.name] -= 1
            if not self._unfetched[shard.name]:
                self._slot.note(shard, whole=True)
            self._report()

    def _descriptor(self, shard: WeightShard) -> int:
        if shard.name not in self._descriptors:
            self._slot.note(shard, whole=False)
            self._descriptors[shard.name] = self._slot.open(shard)
        return self._descriptors[shard.name]


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them, or none any more: when one fails, the others have ended before that is known."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _NeighbourStuck(Exception):
    """Another process has the lock and fetches nothing."""


@asynccontextmanager
async def _lock(slot: _Slot, report: Callable[[], None]) -> AsyncIterator[None]:
    """Wait for the lock, for as long as the one who has it makes progress."""
    taken, loop = _taken(slot.lock_path), asyncio.get_running_loop()
    try:
        waiting = asyncio.wrap_future(taken)
        written, since = slot.last_write(), loop.time()
        while not (await asyncio.wait({waiting}, timeout=LOOK_SECONDS))[0]:
            if (now := slot.last_write()) != written:
                written, since = now, loop.time()
                report()
            elif loop.time() - since > NEIGHBOUR_SECONDS:
                raise _NeighbourStuck
        descriptor = waiting.result()
    except BaseException:
        if not taken.cancel():
            taken.add_done_callback(_give_back)
        raise
    try:
        yield
    finally:
        os.close(descriptor)


def _give_back(taken: "Future[int]") -> None:
    if taken.exception() is None:
        os.close(taken.result())


def _taken(path: Path) -> "Future[int]":
    """A descriptor that has the lock, once it does. Nobody waits for the thread: whoever has the lock may keep it."""
    taken: Future[int] = Future()

    def take() -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if taken.set_running_or_notify_cancel():
                taken.set_exception(error)
            return
        if taken.set_running_or_notify_cancel():
            taken.set_result(descriptor)
        else:
            os.close(descriptor)

    threading.Thread(target=take, name="areal weights lock", daemon=True).start()
    return taken


def _is_here(update: WeightUpdate, shard: WeightShard) -> bool:
    """By size only: whoever uses it compares its digest."""
    with suppress(OSError):
        return (Path(update.path) / shard.name).stat().st_size == shard.size_bytes
    return False


def _write(descriptor: int, piece: bytes, start: int) -> None:
    done = 0
    while done < len(piece):
        done += os.pwrite(descriptor, memoryview(piece)[done:], start + done)
