"""A real vLLM server in its engine process, and engines on it: over that process, and on the server itself."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal.api.engine_api import WeightUpdate
from areal.config.training import OptimizerConfig
from areal.engine.inference.http_server import HttpServer
from areal.engine.inference.remote import RemoteEngine
from areal.engine.inference.vllm import START_SECONDS, VllmEngine
from areal.engine.model.architecture import read_architecture
from areal.engine.training.engine import TrainingEngine
from areal.infra.rpc.connect import connect
from areal.infra.rpc.wire import api_wire

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


@dataclass
class VllmProcess:
    """`python -m areal.engine.inference.server --backend vllm`, as a user starts it by hand."""

    process: asyncio.subprocess.Process
    place: Path
    output: list[str]

    @property
    def address(self) -> str:
        return f"unix:{self.place}/engine"

    @property
    def socket(self) -> Path:
        """That of vLLM itself."""
        (found,) = self.place.glob("areal-vllm-*/socket")
        return found

    @property
    def server_pid(self) -> int:
        """Of vLLM itself."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = [pid for pid in children if b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return int(found)


@asynccontextmanager
async def vllm_process(model: Path, place: Path) -> AsyncIterator[VllmProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "areal.engine.inference.server", str(model), "--backend", "vllm"),
        *("--python", str(PYTHON), "--engine-arg=--enforce-eager"),
        *("--listen", f"unix:{place}/engine"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # It shares the machine with the tests, and leaves nothing elsewhere.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(place)},
    )
    started = VllmProcess(process, place, [])
    serves = asyncio.Event()

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            started.output.append(line.decode(errors="replace").rstrip())
            if started.output[-1].startswith("the engine serves at"):
                serves.set()
        serves.set()

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(START_SECONDS):
            await serves.wait()
        assert process.returncode is None, "\n".join(started.output[-40:])
        yield started
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)
        await reading


class VllmEngines:
    """Opens engines on one server, and publishes weights for them."""

    of_others = True

    def __init__(self, vllm: VllmProcess, model: Path) -> None:
        self.vllm, self.model = vllm, model
        self.trainer = TrainingEngine(read_architecture(model), OptimizerConfig(), total_steps=1, directory=model)

    async def open(self) -> RemoteEngine:
        """As a rollout worker has it."""
        engine = RemoteEngine(await connect(self.vllm.address, wire=api_wire(), peer="the engine"))
        await engine.resume()  # a test that failed may have left it paused
        return engine

    async def open_directly(self) -> VllmEngine:
        """Without the process that holds the server, which must not change weights meanwhile."""
        engine = await VllmEngine.join(HttpServer("vLLM", f"unix:{self.vllm.socket}"), self.model)
        await engine.resume()
        return engine

    def publish(self) -> WeightUpdate:
        """Weights that differ a little from the last ones."""
        self.trainer.flat *= 1.01
        self.trainer.version += 1
        return self.trainer.publish()
