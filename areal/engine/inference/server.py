"""The embedded engine as a process of its own: `python -m areal.engine.inference.server MODEL [DTYPE [SOCKET_DIR]]`.

It connects to the driver, serves rollout workers on a Unix socket whose address it sends there, and exits, leaving no
files, when the driver hangs up or on SIGTERM. An engine that has failed permanently serves no requests: the process
then ends with code 1 and the cause as its last line, which the driver reports.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from areal.api.messages import ENGINE_ROLE
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.remote import engine_handlers
from areal.engine.models import open_runner
from areal.infra.rpc.channel import Channel
from areal.infra.rpc.connect import connect_to_driver, serve
from areal.infra.rpc.wire import api_wire
from areal.utils.hf_utils import load_hf_tokenizer

NICENESS = 10
"""Where cores are scarce the engine yields to the processes that send requests: more of these then share a step."""


def load_engine(directory: Path, dtype: str = "float32") -> EmbeddedEngine:
    """An embedded engine on the weights of a model directory."""
    return EmbeddedEngine(open_runner(directory, dtype), load_hf_tokenizer(directory))


async def serve_engine(directory: Path, dtype: str = "float32", socket_directory: str | None = None) -> str | None:
    """Returns why the engine failed; None if it was asked to stop. Without a directory for its socket it makes one."""
    engine = load_engine(directory, dtype)
    handlers = engine_handlers(engine) | {"cpu_seconds": time.process_time}
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    engine.on_failure = ended.set

    def add_handlers(channel: Channel) -> None:
        channel.handlers.update(handlers | engine_handlers(engine, channel))

    with ExitStack() as stack:
        place = socket_directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-"))
        address = f"unix:{place}/engine"
        endpoint = await serve(address, add_handlers, wire=api_wire(), peer="a rollout worker")
        driver = await connect_to_driver(ENGINE_ROLE, 0, {"address": endpoint.address}, handlers, wire=api_wire())
        driver.closed.add_done_callback(lambda _: ended.set())
        await ended.wait()
        await endpoint.close()
        await engine.aclose()
    return engine.failure


if __name__ == "__main__":
    os.nice(NICENESS)
    sys.exit(asyncio.run(serve_engine(Path(sys.argv[1]), *sys.argv[2:])))
