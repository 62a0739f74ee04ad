"""The engine as a process: how it begins, and the ways it ends."""

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from engine_kinds import until
from engine_process import engine_process
from tiny_models import write_model

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineError, ProcessDied, RequestError, WeightMismatch
from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.remote import RemoteEngine
from areal.engine.inference.server import ServedEngine, _Watched
from areal.engine.model.published import WeightWriter
from areal.engine.models import open_trainable
from areal.infra.rpc.channel import ChannelClosed
from areal.infra.rpc.connect import connect
from areal.infra.rpc.wire import api_wire

pytestmark = pytest.mark.slow

REQUEST = ModelRequest("r", [1, 2, 3], GenerationHyperparameters(max_new_tokens=4000, seed=1))


def exists(path: str) -> bool:
    return os.path.exists(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


async def test_a_server_without_its_model_ends_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match=r"engine \(pid \d+\) exited with code 1: .*no model at"):
        async with engine_process(tmp_path / "gone", tmp_path / "log"):
            pass


async def test_a_server_lets_nobody_in_who_does_not_know_the_secret_of_the_run(model: Path, tmp_path: Path) -> None:
    async with engine_process(model, tmp_path / "log") as process:
        # Workers know the run's own secret, which is for the driver.
        for secret in (b"", b"a guess", process.listener.secret):
            with pytest.raises(ChannelClosed, match="during the handshake"):
                await connect(process.arrival.info["address"], wire=api_wire(), secret=secret)
        engine = await process.connect()
        assert not (await engine.health()).paused


@pytest.mark.parametrize(("running", "told"), [(0, "0 answers"), (1, "1 answer"), (2, "2 answers")])
async def test_a_server_counts_what_it_generates_for_whoever_asks(running: int, told: str) -> None:
    class Busy:
        async def health(self) -> EngineHealth:
            return EngineHealth(version=3, digest="", running=running, waiting=1, paused=False)

    watched = _Watched()
    watched.engine = cast(ServedEngine, Busy())
    (doing,) = await watched.doing()
    assert doing.what == f"has the weights of version 3; {told} being generated, 1 queued"


async def test_a_worker_may_generate_and_control_nothing(model: Path, tmp_path: Path) -> None:
    async with engine_process(model, tmp_path / "log") as process:
        engine = await process.connect()
        worker, update = RemoteEngine(engine.channel), WeightUpdate(1, "one", "")
        for refused, verb in (
            (worker.stage_weights(update), "stage_weights"),
            (worker.update_weights(update), "update_weights"),
            (worker.pause(), "pause"),
            (worker.resume(), "resume"),
            (worker.activity(), "activity"),
            (worker.pauses(), "pauses"),
            (worker.swaps(), "swaps"),
        ):
            with pytest.raises(RequestError, match=f"only the driver of a run may call '{verb}' on an engine"):
                await refused
        short = replace(REQUEST, gconfig=REQUEST.gconfig.new(max_new_tokens=4))
        assert len((await asyncio.wait_for(worker.agenerate(short), 30)).output_tokens) == 4
        await engine.driver.pause()
        assert (await worker.health()).paused


async def test_a_server_fetches_weights_that_are_not_on_its_host_while_it_generates(
    model: Path, tmp_path: Path
) -> None:
    decoder = open_trainable(model)
    (tmp_path / "published").mkdir()
    writer = WeightWriter(tmp_path / "published", decoder.named_weights())
    async with engine_process(model, tmp_path / "log") as process:
        engine = await process.connect()
        request = replace(REQUEST, gconfig=REQUEST.gconfig.new(max_new_tokens=600))
        answering = asyncio.create_task(engine.agenerate(request))
        for version in (1, 2, 3):
            with torch.no_grad():
                decoder.flat.mul_(1.01)
            process.shipper.published = update = writer.write(version)
            elsewhere = replace(update, path="/on/another/host")
            await asyncio.wait_for(engine.stage_weights(elsewhere), 60)
            await asyncio.wait_for(engine.update_weights(elsewhere), 60)
            health = await engine.health()
            assert (health.version, health.digest) == (version, update.digest)
        with torch.no_grad():
            decoder.flat.mul_(1.01)
        gone = replace(writer.write(4), path="/on/another/host")
        with pytest.raises(WeightMismatch, match="version 4 cannot be fetched any more; published is 3"):
            await asyncio.wait_for(engine.stage_weights(gone), 60)
        assert len((await asyncio.wait_for(answering, 60)).output_tokens) == 600


async def test_a_server_whose_engine_has_failed_ends_with_the_cause(model: Path, tmp_path: Path) -> None:
    program = (str(Path(__file__).with_name("failing_server.py")),)
    async with engine_process(model, tmp_path / "log", program) as process:
        engine = await process.connect()
        socket = process.arrival.info["address"].removeprefix("unix:")
        with pytest.raises(EngineError, match=r"out of memory|is gone"):
            await asyncio.wait_for(engine.agenerate(REQUEST), 30)
        assert await asyncio.wait_for(process.placement.wait(), 30) == 1
        assert (
            "exited with code 1: the engine failed: RuntimeError('out of memory')" in process.placement.describe_exit()
        )
        assert not exists(os.path.dirname(socket))


async def test_clients_that_hang_up_at_any_moment_leave_the_server_to_the_others(model: Path, tmp_path: Path) -> None:
    short = replace(REQUEST, gconfig=REQUEST.gconfig.new(max_new_tokens=40))
    async with engine_process(model, tmp_path / "log") as process:
        stays = await process.connect()
        expected = (await asyncio.wait_for(stays.agenerate(short), 30)).output_tokens
        for _ in range(10):
            leaves = await process.connect()
            left = [asyncio.create_task(leaves.agenerate(short)) for _ in range(10)]
            waits = [asyncio.create_task(stays.agenerate(short)) for _ in range(3)]
            await asyncio.wait_for(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED), 30)
            await leaves.aclose()
            await asyncio.gather(*left, return_exceptions=True)
            answers = await asyncio.wait_for(asyncio.gather(*waits), 30)
            assert [answer.output_tokens for answer in answers] == [expected] * 3
        await until(stays, running=0, waiting=0)


async def test_a_killed_server_fails_the_calls_that_wait_for_it(model: Path, tmp_path: Path) -> None:
    async with engine_process(model, tmp_path / "log") as process:
        engine = await process.connect()
        waiting = asyncio.create_task(engine.agenerate(REQUEST))
        await engine.health()
        os.kill(process.placement.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the engine is gone"):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(EngineError):
            await engine.health()
        # A process killed this way leaves its socket.
        shutil.rmtree(os.path.dirname(process.arrival.info["address"].removeprefix("unix:")))


@pytest.mark.parametrize("by", ["the driver hanging up", "SIGTERM"])
async def test_a_server_that_ends_leaves_no_files(model: Path, tmp_path: Path, by: str) -> None:
    async with engine_process(model, tmp_path / "log") as process:
        socket = process.arrival.info["address"].removeprefix("unix:")
        assert exists(socket)
        if by == "SIGTERM":
            os.kill(process.placement.pid, signal.SIGTERM)
        else:
            await process.listener.close()
        assert await asyncio.wait_for(process.placement.wait(), 30) == 0
        assert not exists(os.path.dirname(socket))
