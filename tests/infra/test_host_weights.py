"""Published weights on a host that does not have the driver's files."""

import asyncio
import fcntl
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ArealError, WeightMismatch
from areal.engine.model.published import WeightReader, WeightWriter
from areal.infra.rpc.channel import Channel, ChannelClosed
from areal.infra.rpc.connect import Listener, connect, serve
from areal.infra.rpc.host_weights import IN_FLIGHT, HostWeights
from areal.infra.rpc.shipping import READ_WEIGHTS, Shipper
from areal.infra.rpc.wire import api_wire

PIECES = 24
PIECE_BYTES = 1 << 16
DEADLINE_SECONDS = 60.0
FETCH = """
import asyncio, pickle, sys
from pathlib import Path
from areal.infra.rpc import host_weights
from areal.infra.rpc.connect import connect
from areal.infra.rpc.wire import api_wire

host_weights._is_here = lambda update, shard: False
address, place, update, host_weights.PIECE_BYTES = pickle.load(sys.stdin.buffer)
dial = lambda source: connect(address, wire=api_wire(), secret=b"secret")
asyncio.run(host_weights.HostWeights(place, place, dial).fetch(update))
"""


class Driver:
    """Ships weights from an event loop in a thread of its own, as a driver is another process; counts what it sends."""

    def __init__(self, directory: Path) -> None:
        self.shipper = Shipper([])
        self.address = f"unix:{directory}/socket"
        self.sent = 0
        """Pieces; not those of which it only said that they are right."""
        self.asked = 0
        self.answers = 1 << 30
        """Beyond so many it does not answer."""
        self.arrived = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._listener: Listener = self._run(serve(self.address, self._welcome, wire=api_wire(), secret=b"secret"))

    def dial(self, source: str) -> Any:
        return connect(self.address, wire=api_wire(), secret=b"secret")

    def hang_up(self) -> None:
        async def hang_up() -> None:
            await asyncio.gather(*(channel.close() for channel in list(self._listener.channels)))

        self._run(hang_up())

    def until_asked(self, count: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.asked >= count, DEADLINE_SECONDS)

    def close(self) -> None:
        self._run(self._listener.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_SECONDS)
        self._loop.close()

    def _welcome(self, channel: Channel) -> None:
        channel.handlers[READ_WEIGHTS] = self._read

    async def _read(self, *args: Any) -> Any:
        with self.arrived:
            self.asked += 1
            self.arrived.notify_all()
        if self.asked > self.answers:
            await asyncio.get_running_loop().create_future()
        piece = await self.shipper.handlers[READ_WEIGHTS](*args)
        self.sent += piece is not None
        return piece

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_SECONDS)


class Published:
    """Two tensors, each a shard of its own, that a driver publishes."""

    def __init__(self, driver: Driver, directory: Path) -> None:
        self.first = torch.randn(PIECE_BYTES // 4 * (PIECES // 2) - 1000)
        self.second = torch.randn_like(self.first)
        self._driver = driver
        self._writer = WeightWriter(directory, self.named)

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [("first", self.first), ("second", self.second)]

    def publish(self, version: int) -> WeightUpdate:
        self._driver.shipper.published = update = self._writer.write(version)
        return update

    def check(self, fetched: WeightUpdate, reader: WeightReader | None = None) -> None:
        """Raises unless what was fetched is what was published last."""
        pairs = (reader or WeightReader()).read(fetched, self.named)
        assert all(torch.equal(arrived, tensor) for tensor, arrived in pairs)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.close()


@pytest.fixture
def published(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.setattr("areal.engine.model.published.SHARD_BYTES", 1)
    monkeypatch.setattr("areal.infra.rpc.shipping.PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr("areal.infra.rpc.host_weights.PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr("areal.infra.rpc.host_weights._is_here", lambda update, shard: False)  # as on another host
    (tmp_path / "published").mkdir()
    return Published(driver, tmp_path / "published")


@pytest.fixture
def host(driver: Driver, tmp_path: Path) -> Callable[[], HostWeights]:
    """Makes engines of one host."""
    (tmp_path / "shared").mkdir()

    def engine() -> HostWeights:
        own = tmp_path / f"own-{len(list(tmp_path.iterdir()))}"
        own.mkdir()
        return HostWeights(tmp_path / "shared", own, driver.dial)

    return engine


def fetching_process(driver: Driver, place: Path, update: WeightUpdate) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", FETCH], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin:
        pickle.dump((driver.address, place, update, PIECE_BYTES), process.stdin)
    return process


def damage(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(PIECE_BYTES + 5)
        file.write(b"damage")


async def soon(work: Any) -> Any:
    return await asyncio.wait_for(work, DEADLINE_SECONDS)


async def test_weights_are_fetched_in_pieces_and_arrive_whole(
    driver: Driver, published: Published, host: Callable[[], HostWeights], tmp_path: Path
) -> None:
    engine, reader = host(), WeightReader()
    for version in range(4):  # the files of the version before the last are written again
        published.first += 1
        published.second += 1
        fetched = await soon(engine.fetch(published.publish(version)))
        assert Path(fetched.path).parent == tmp_path / "shared"
        published.check(fetched, reader)
    assert driver.sent == 4 * PIECES


async def test_weights_arrive_while_the_event_loop_computes(
    driver: Driver, published: Published, host: Callable[[], HostWeights], tmp_path: Path
) -> None:
    """Over a channel that an engine reads between two decode steps, 538 MB took longer than any deadline."""
    fetching = asyncio.ensure_future(host().fetch(published.publish(0)))
    await asyncio.sleep(0)  # it begins; from here on the event loop does not turn
    driver.until_asked(PIECES)
    published.check(await soon(fetching))


async def test_a_fetch_that_was_broken_off_goes_on_where_it_stopped(
    driver: Driver, published: Published, host: Callable[[], HostWeights]
) -> None:
    update, engine = published.publish(0), host()
    driver.answers = PIECES // 2 + 1
    fetching = asyncio.ensure_future(engine.fetch(update))
    await asyncio.to_thread(driver.until_asked, driver.answers + IN_FLIGHT)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    driver.answers = 1 << 30
    published.check(await soon(engine.fetch(update)))
    assert driver.sent == PIECES


async def test_a_fetch_whose_connection_breaks_goes_on_over_another(
    driver: Driver, published: Published, host: Callable[[], HostWeights]
) -> None:
    driver.answers = PIECES // 2 + 1
    fetching = asyncio.ensure_future(host().fetch(published.publish(0)))
    await asyncio.to_thread(driver.until_asked, driver.answers + IN_FLIGHT)
    driver.answers = 1 << 30
    await asyncio.to_thread(driver.hang_up)
    published.check(await soon(fetching))
    assert driver.sent == PIECES


@pytest.mark.slow
async def test_what_a_killed_engine_had_fetched_its_neighbour_goes_on_with(
    driver: Driver, published: Published, host: Callable[[], HostWeights], tmp_path: Path
) -> None:
    update = published.publish(0)
    driver.answers = PIECES // 2 + 1
    process = fetching_process(driver, tmp_path / "shared", update)
    try:
        await asyncio.to_thread(driver.until_asked, driver.answers + IN_FLIGHT)
        neighbour = asyncio.ensure_future(host().fetch(update))
        driver.answers = 1 << 30
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_SECONDS)
    published.check(await soon(neighbour))
    assert driver.sent == PIECES


async def test_engines_of_one_host_fetch_a_version_once(
    driver: Driver, published: Published, host: Callable[[], HostWeights]
) -> None:
    update = published.publish(0)
    fetched = await soon(asyncio.gather(*(host().fetch(update) for _ in range(3))))
    assert driver.sent == PIECES
    assert len({each.path for each in fetched}) == 1
    published.check(fetched[0])


async def test_shards_that_did_not_change_are_not_fetched_again(
    driver: Driver, published: Published, host: Callable[[], HostWeights]
) -> None:
    engine, reader = host(), WeightReader()
    published.check(await soon(engine.fetch(published.publish(0))), reader)
    for version in range(1, 4):  # the other directory, then the same again
        driver.sent = 0
        published.first += 1
        published.check(await soon(engine.fetch(published.publish(version))), reader)
        assert driver.sent == PIECES // 2


async def test_of_a_damaged_copy_only_the_wrong_pieces_are_fetched_again(
    driver: Driver, published: Published, host: Callable[[], HostWeights]
) -> None:
    engine, update = host(), published.publish(0)
    fetched = await soon(engine.fetch(update))
    damage(Path(fetched.path) / update.shards[0].name)
    with pytest.raises(WeightMismatch):
        published.check(await soon(engine.fetch(update)))
    driver.sent = 0
    published.check(await soon(engine.fetch(update, distrust=True)))
    assert driver.sent == 1


async def test_an_engine_whose_neighbour_fetches_nothing_fetches_for_itself(
    driver: Driver,
    published: Published,
    host: Callable[[], HostWeights],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("areal.infra.rpc.host_weights.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("areal.infra.rpc.host_weights.NEIGHBOUR_SECONDS", 0.05)
    lock = os.open(tmp_path / "shared/weights-0.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    fetched = await soon(host().fetch(published.publish(0)))
    os.close(lock)
    assert Path(fetched.path).parent != tmp_path / "shared"
    published.check(fetched)
    published.check(await soon(host().fetch(published.publish(2))))  # the lock that was not waited for is not kept


async def test_a_driver_that_sends_nothing_is_given_up_with_the_reason(
    driver: Driver, published: Published, host: Callable[[], HostWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.infra.rpc.host_weights.PIECE_SECONDS", 0.1)
    driver.answers = 2
    with pytest.raises(TimeoutError, match=r"did not answer 'read_weights' within 0.1 s"):
        await soon(host().fetch(published.publish(0)))


async def test_every_piece_is_reported(driver: Driver, published: Published, tmp_path: Path) -> None:
    arrived = []
    engine = HostWeights(tmp_path, tmp_path, driver.dial, lambda: arrived.append(threading.current_thread()))
    await soon(engine.fetch(published.publish(0)))
    assert arrived == [threading.current_thread()] * PIECES


async def test_a_host_without_room_for_the_weights_says_so(
    driver: Driver, published: Published, host: Callable[[], HostWeights]
) -> None:
    update = published.publish(0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ArealError, match=r"shared on .* must have room for two versions of the published weights"):
            await soon(host().fetch(update))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_weights_of_another_version_are_refused(
    driver: Driver, published: Published, host: Callable[[], HostWeights]
) -> None:
    old = published.publish(0)
    published.publish(1)
    with pytest.raises(WeightMismatch, match="version 0 cannot be fetched any more; published is 1"):
        await soon(host().fetch(old))


async def test_weights_that_a_neighbour_has_are_not_replaced_by_older_ones(
    driver: Driver, published: Published, host: Callable[[], HostWeights]
) -> None:
    old = published.publish(0)
    published.first += 1
    published.check(fetched := await soon(host().fetch(published.publish(2))))
    with pytest.raises(WeightMismatch, match="version 0 cannot be fetched any more; version 2 has been, in its place"):
        await soon(host().fetch(old))
    published.check(fetched)


async def test_files_of_another_layout_do_not_stay_beside_the_shards(
    driver: Driver, published: Published, host: Callable[[], HostWeights]
) -> None:
    engine = host()
    fetched = await soon(engine.fetch(published.publish(0)))
    (Path(fetched.path) / "adapter_model.safetensors").write_bytes(b"of an adapter")
    published.first += 1
    fetched = await soon(engine.fetch(update := published.publish(2)))
    assert set(os.listdir(fetched.path)) == {shard.name for shard in update.shards}


async def test_an_engine_that_holds_no_weights_fetches_none(host: Callable[[], HostWeights]) -> None:
    update = WeightUpdate(3, "three", "")
    assert await host().fetch(update) is update


async def test_shards_come_from_where_each_was_written_and_those_of_the_same_host_are_copied(
    driver: Driver, published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two ranks: one on another host, one on the engine's own."""
    update = published.publish(0)
    there, here = update.shards
    update = replace(update, shards=(replace(there, source="a rank's address"), here))
    driver.shipper.published = update
    monkeypatch.setattr("areal.infra.rpc.host_weights._is_here", lambda update, shard: shard.name == here.name)
    dialled: list[str] = []

    def dial(source: str) -> Any:
        dialled.append(source)
        return driver.dial(source)

    (tmp_path / "shared").mkdir()
    published.check(await soon(HostWeights(tmp_path / "shared", tmp_path, dial).fetch(update)))
    assert dialled == ["a rank's address"]
    assert driver.sent == -(-there.size_bytes // PIECE_BYTES)


async def test_a_source_that_is_gone_ends_the_fetch_and_what_others_sent_is_kept(
    driver: Driver, published: Published, tmp_path: Path
) -> None:
    update = published.publish(0)
    update = replace(update, shards=tuple(replace(shard, source=f"rank {n}") for n, shard in enumerate(update.shards)))
    driver.shipper.published = update
    gone = asyncio.Event()

    async def dial(source: str) -> Any:
        if source == "rank 1" and not gone.is_set():
            raise ChannelClosed("rank 1 is gone")
        return await driver.dial(source)

    (tmp_path / "shared").mkdir()
    engine = HostWeights(tmp_path / "shared", tmp_path, dial)
    with pytest.raises(ChannelClosed, match="rank 1 is gone"):
        await soon(engine.fetch(update))
    gone.set()
    published.check(await soon(engine.fetch(update)))
