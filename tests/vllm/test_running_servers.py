"""vLLM servers that run already, which a run is given by `rollout.addresses`."""

import asyncio
import os
import shlex
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from engine_kinds import answer
from runs_on_vllm import running
from tiny_models import byte_tokenizer, write_model
from vllm_engines import PYTHON

from areal.api.errors import EngineError
from areal.config.training import OptimizerConfig
from areal.engine.inference.http_server import HttpServer, ServerCommand
from areal.engine.inference.vllm import CPU_ENVIRONMENT, START_SECONDS, by_hand, join_vllm
from areal.engine.model.architecture import read_architecture
from areal.engine.training.engine import TrainingEngine
from areal.trainer.canary import TOLERANCES, Canaries
from areal.trainer.engines import EngineState

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), head_dim=32)


@asynccontextmanager
async def started(command: str) -> AsyncIterator[str]:
    """The address of a server that a shell command starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["sh", "-c", f"exec env {command} --port {port} --enforce-eager"]
    environ = {**CPU_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1"}
    address = f"http://127.0.0.1:{port}"
    server = await HttpServer.start(ServerCommand("vLLM", words, environ, address), AsyncExitStack(), START_SECONDS)
    try:
        yield address
    finally:
        await server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def address(model: Path) -> AsyncIterator[str]:
    """Of a server that was started with the command that the documentation gives."""
    async with started(by_hand(model, python=str(PYTHON), address=())) as address:
        yield address


async def test_a_run_uses_a_server_that_runs_already(tmp_path: Path, model: Path, address: str) -> None:
    trainer = TrainingEngine(read_architecture(model), OptimizerConfig(), total_steps=1, directory=model)
    trainer.version = 7
    try:
        async with running(model, tmp_path / "logs", backend="vllm", addresses=[address]) as run:
            update = Canaries(byte_tokenizer(), TOLERANCES["float32"]).attached(trainer.publish(), trainer)
            await asyncio.wait_for(run.engines.publish(update), 60)
            whole = await answer(run.worker, greedy=True)
            assert set(whole.output_versions) == {7}
            (member,) = run.engines.members
            assert member.placement is not None
            os.kill(member.placement.pid, signal.SIGKILL)
            async with asyncio.timeout(START_SECONDS):
                await run.engines.until(lambda: member.state is not EngineState.SERVING)
                await run.engines.until(lambda: member.state is EngineState.SERVING)
            assert (await answer(run.worker, greedy=True)).output_tokens == whole.output_tokens
    finally:
        trainer.close()


async def test_a_server_that_cannot_read_new_weights_is_refused(model: Path, address: str, tmp_path: Path) -> None:
    engine = await join_vllm(address, model, tmp_path)
    with pytest.raises(EngineError, match=r"vLLM must read this, got \['False'\]"):
        await engine.ask_workers("can_read", "read this", path=str(model / "config.json"), content="{}")
    await engine.aclose()


async def test_a_server_without_the_extension_is_refused_with_the_command_that_starts_one(model: Path) -> None:
    plain = f"{PYTHON} -m vllm.entrypoints.openai.api_server --model {shlex.quote(str(model))} --host 127.0.0.1"
    async with started(plain) as address:
        with pytest.raises(
            EngineError, match=r"(?s)start it on the host of the run.*--worker-extension-cls"
        ) as refused:
            await join_vllm(address, model)
        assert by_hand(model) in str(refused.value)
    with pytest.raises(EngineError, match=f"vLLM at {address} cannot be reached"):
        await join_vllm(address, model)
