"""An engine as a process of its own, which others reach over a socket: `python -m areal.engine.inference.server`.

In a run the driver starts it. It connects to the driver, serves rollout workers on a Unix socket whose address it sends
there, and exits, leaving no files, when the driver hangs up or on SIGTERM. Started by hand with `--listen ADDRESS`, it
serves whoever proves to know its secret, until SIGTERM (`rollout.addresses`).

An engine that has failed permanently serves no requests: the process then ends with code 1 and the cause as its last
line, which the driver reports.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal.api.engine_api import InferenceEngine
from areal.api.messages import ENGINE_ROLE
from areal.config.backend import KINDS
from areal.config.errors import ArealError, require
from areal.config.keys import ENGINE_SECRET_VARIABLE, find_key
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.remote import engine_handlers
from areal.engine.models import open_runner
from areal.infra.rpc.channel import Channel
from areal.infra.rpc.connect import connect_to_driver, read_secret, serve
from areal.infra.rpc.wire import api_wire
from areal.utils.hf_utils import load_hf_tokenizer

NICENESS = 10
"""Where cores are scarce the engine yields to the processes that send requests: more of these then share a step."""


@dataclass(frozen=True)
class EngineOptions:
    model: Path
    """A Hugging Face directory."""
    dtype: str = "float32"
    device: str = "auto"
    gpus: int = 1
    """That the model is spread over."""
    python: str = ""
    """The interpreter that has vLLM or SGLang; empty = this one."""
    arguments: Sequence[str] = ()
    """Further ones of vLLM's or SGLang's server."""
    scratch: Path | None = None
    """Where sockets may be made; None = where temporary files are."""


class ServedEngine(InferenceEngine, Protocol):
    failure: str | None
    """Why the engine has failed permanently; None while it has not."""
    on_failure: Callable[[], None]
    """Called when it has."""


def load_engine(directory: Path, dtype: str = "float32", device: str = "auto") -> EmbeddedEngine:
    """An embedded engine on the weights of a model directory."""
    return EmbeddedEngine(open_runner(directory, dtype, device), load_hf_tokenizer(directory))


async def _open_embedded(options: EngineOptions) -> ServedEngine:
    return load_engine(options.model, options.dtype, options.device)


async def _open_vllm(options: EngineOptions) -> ServedEngine:
    from areal.engine.inference.vllm import open_vllm

    return await open_vllm(
        options.model,
        options.dtype,
        python=options.python,
        gpus=options.gpus,
        arguments=options.arguments,
        scratch=options.scratch,
    )


async def _open_sglang(options: EngineOptions) -> ServedEngine:
    from areal.engine.inference.sglang import open_sglang

    return await open_sglang(
        options.model, options.dtype, python=options.python, gpus=options.gpus, arguments=options.arguments
    )


OPENERS: dict[str, Callable[[EngineOptions], Awaitable[ServedEngine]]] = {
    "embedded": _open_embedded,
    "vllm": _open_vllm,
    "sglang": _open_sglang,
}
"""How an engine of each kind in `areal.config.backend.KINDS` comes about."""


async def serve_in_run(engine: ServedEngine, index: int, sockets: str | None) -> None:
    """Serve the workers of a run until the driver hangs up. Without a directory for its socket it makes one."""
    ended = _ended(engine)
    secret = read_secret()
    with ExitStack() as stack:
        place = sockets or stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-"))
        address = f"unix:{place}/engine-{index}-{os.getpid()}"  # nothing that is meant for this process reaches another
        endpoint = await serve(
            address, lambda channel: _add_handlers(engine, channel), wire=api_wire(), peer="a worker", secret=secret
        )
        handlers = engine_handlers(engine) | {"cpu_seconds": time.process_time}
        info = {"address": endpoint.address}
        driver = await connect_to_driver(ENGINE_ROLE, index, info, handlers, wire=api_wire(), secret=secret)
        driver.closed.add_done_callback(lambda _: ended.set())
        await ended.wait()
        await endpoint.close()
        await engine.aclose()


async def serve_by_hand(engine: ServedEngine, address: str, secret: bytes) -> None:
    """Serve runs that name this address, until SIGTERM."""
    ended = _ended(engine)
    endpoint = await serve(
        address, lambda channel: _add_handlers(engine, channel), wire=api_wire(), peer="a run", secret=secret
    )
    print(f"the engine serves at {endpoint.address}", flush=True)
    await ended.wait()
    await endpoint.close()
    await engine.aclose()


def _ended(engine: ServedEngine) -> asyncio.Event:
    """Set when the engine has failed, or is asked to stop."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    engine.on_failure = ended.set
    return ended


def _add_handlers(engine: ServedEngine, channel: Channel) -> None:
    channel.handlers.update(engine_handlers(engine, channel) | {"cpu_seconds": time.process_time})


async def main(words: list[str] | None = None) -> str | None:
    """Returns why the engine failed; None if it was asked to stop."""
    parser = argparse.ArgumentParser(prog="python -m areal.engine.inference.server", description="Serve an engine.")
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--backend", default="embedded", choices=KINDS)
    parser.add_argument("--gpus", type=int, default=1, help="that the model is spread over")
    parser.add_argument("--dtype", default="float32", help="what the embedded engine computes in")
    parser.add_argument("--device", default="auto", help="where the embedded engine computes")
    parser.add_argument("--python", default="", help="the interpreter that has vLLM or SGLang; left out = this one")
    parser.add_argument("--engine-arg", action="append", default=[], help="a further one of vLLM's or SGLang's server")
    parser.add_argument("--index", type=int, default=0, help="which engine of its run it is")
    parser.add_argument("--sockets", help="a directory for the socket; left out = one of its own")
    parser.add_argument("--listen", help="serve at unix:PATH or tcp:HOST:PORT, without a driver")
    parser.add_argument("--secret-file", help=f"for --listen; left out = the secret is in {ENGINE_SECRET_VARIABLE}")
    given = parser.parse_args(words)
    secret = b""
    if given.listen is not None:
        secret = find_key(None, given.secret_file, ENGINE_SECRET_VARIABLE, "the engine's secret").encode()
        os.environ.pop(ENGINE_SECRET_VARIABLE, None)
        require(
            bool(secret) or given.listen.startswith("unix:"),
            f"{given.listen} can be reached by others and needs a secret; put one into {ENGINE_SECRET_VARIABLE} or "
            "--secret-file, there and in the run",
        )
    options = EngineOptions(
        given.model,
        given.dtype,
        given.device,
        given.gpus,
        python=given.python,
        arguments=given.engine_arg,
        scratch=None if given.sockets is None else Path(given.sockets),
    )
    engine = await OPENERS[given.backend](options)
    if given.listen is not None:
        await serve_by_hand(engine, given.listen, secret)
    else:
        await serve_in_run(engine, given.index, given.sockets)
    return engine.failure


if __name__ == "__main__":
    os.nice(NICENESS)
    try:
        sys.exit(asyncio.run(main()))
    except ArealError as error:
        sys.exit(f"{type(error).__name__}: {error}")
