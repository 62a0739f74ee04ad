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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args

from areal.api.engine_api import InferenceEngine, WeightUpdate
from areal.api.errors import WeightMismatch
from areal.api.messages import ENGINE_ROLE, Doing
from areal.config.backend import KINDS
from areal.config.errors import ArealError, require
from areal.config.keys import ENGINE_SECRET_VARIABLE, find_key
from areal.config.rollout import Kernel
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.remote import GENERATE_ROLE, PROGRESS, engine_handlers, worker_handlers
from areal.engine.models import open_runner, require_model, tokenizer_files
from areal.infra.rpc.channel import Channel, Handler
from areal.infra.rpc.connect import connect, connect_to_driver, driver_address, own_address, read_secret, serve
from areal.infra.rpc.frames import role_secret
from areal.infra.rpc.host_weights import HostWeights
from areal.infra.rpc.shipping import is_here, local_model, scratch, shared
from areal.infra.rpc.status import start_answering
from areal.infra.rpc.wire import api_wire
from areal.infra.status import of_wait
from areal.utils import garbage
from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.shorten import plural
from areal.utils.waits import Waits

HEALTH_SECONDS = 0.5
"""For the answer of a vLLM or SGLang server to who asks what the engine does."""
NICENESS = 10
"""Where cores are scarce the engine yields to the processes that send requests: more of these then share a step."""


@dataclass(frozen=True)
class EngineOptions:
    model: Path
    """A Hugging Face directory."""
    dtype: str = "float32"
    device: str = "auto"
    kernel: Kernel = "auto"
    gpus: int = 1
    """That the model is spread over."""
    with_weights: bool = True
    """Whether the directory has weights; otherwise they come when they are published."""
    python: str = ""
    """The interpreter that has vLLM or SGLang; empty = this one."""
    arguments: Sequence[str] = ()
    """Further ones of vLLM's or SGLang's server."""
    url: str = ""
    """Of a vLLM or SGLang server that runs already; empty = one is started."""
    scratch: Path | None = None
    """Where sockets may be made; None = where temporary files are."""

    @property
    def server_arguments(self) -> list[str]:
        """Of vLLM's or SGLang's server, which both call weights that are to come "dummy"."""
        return [*([] if self.with_weights else ["--load-format", "dummy"]), *self.arguments]


class ServedEngine(InferenceEngine, Protocol):
    failure: str | None
    """Why the engine has failed permanently; None while it has not."""
    on_failure: Callable[[], None]
    """Called when it has."""

    def cpu_seconds(self) -> float:
        """What this process has used of the processors, and those that it has started for the engine."""
        ...


def load_engine(directory: Path, *, kernel: Kernel = "auto") -> EmbeddedEngine:
    """An embedded engine on the weights of a model directory; `kernel` as `rollout.kernel`."""
    return _embedded(EngineOptions(directory, kernel=kernel))


def _embedded(options: EngineOptions) -> EmbeddedEngine:
    runner = open_runner(
        options.model, options.dtype, options.device, kernel=options.kernel, with_weights=options.with_weights
    )
    return EmbeddedEngine(runner, load_hf_tokenizer(tokenizer_files(options.model)))


async def _open_embedded(options: EngineOptions) -> ServedEngine:
    return _embedded(options)


async def _open_vllm(options: EngineOptions) -> ServedEngine:
    from areal.engine.inference.vllm import join_vllm, open_vllm

    require_model(options.model)
    if options.url:
        return await join_vllm(options.url, options.model, options.scratch)
    return await open_vllm(
        options.model,
        options.dtype,
        python=options.python,
        gpus=options.gpus,
        arguments=options.server_arguments,
        scratch=options.scratch,
    )


async def _open_sglang(options: EngineOptions) -> ServedEngine:
    from areal.engine.inference.sglang import join_sglang, open_sglang

    require_model(options.model)
    if options.url:
        return await join_sglang(options.url, options.model)
    return await open_sglang(
        options.model, options.dtype, python=options.python, gpus=options.gpus, arguments=options.server_arguments
    )


OPENERS: dict[str, Callable[[EngineOptions], Awaitable[ServedEngine]]] = {
    "embedded": _open_embedded,
    "vllm": _open_vllm,
    "sglang": _open_sglang,
}
"""How an engine of each kind in `areal.config.backend.KINDS` comes about."""


async def _opened(kind: str, options: EngineOptions) -> ServedEngine | None:
    """None if it was asked to stop before it served: what it had started has ended then."""
    opening = asyncio.ensure_future(OPENERS[kind](options))
    if kind != "embedded":  # which has nothing to end, and hears nothing while it loads
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, opening.cancel)
    try:
        return await opening
    except asyncio.CancelledError:
        return None


class _Watched:
    """What the process does, for whoever asks: it answers from the first moment."""

    def __init__(self) -> None:
        self.engine: ServedEngine | None = None
        """None while it is being loaded."""
        self.weights: _WeightsFromDriver | None = None

    async def doing(self) -> list[Doing]:
        if self.engine is None:
            return [Doing("it", "loads the model")]
        told = [] if self.weights is None else [of_wait("it", wait) for wait in self.weights.waits.now()]
        try:
            health = await asyncio.wait_for(self.engine.health(), HEALTH_SECONDS)
        except TimeoutError:
            return [*told, Doing("it", "gets no answer from its inference server")]
        except ArealError as error:
            return [*told, Doing("it", f"serves no more: {error}")]
        paused = ", but is paused" if health.paused else ""
        what = f"has the weights of version {health.version}{paused}"
        answers = f"{plural(health.running, 'answer')} being generated, {health.waiting:,} queued"
        return [*told, Doing("it", f"{what}; {answers}")]


async def serve_in_run(engine: ServedEngine, index: int, secret: bytes, watched: _Watched | None = None) -> None:
    """Serve the workers of a run until the driver hangs up: on a Unix socket if all of them are on this host."""
    ended = _ended(engine)
    with ExitStack() as stack:
        host = own_address()
        place = scratch() or stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-"))
        address = f"unix:{place}/engine-{index}-{os.getpid()}" if host is None else f"tcp:{host}:0"
        # Workers know the secret of the run too, so it opens nothing here: the driver has a channel of its own.
        workers = role_secret(secret, GENERATE_ROLE)
        endpoint = await serve(
            address,
            lambda channel: channel.handlers.update(worker_handlers(engine, channel)),
            wire=api_wire(),
            peer="a worker",
            secret=workers,
        )
        weights = _WeightsFromDriver(engine, Path(place), secret)
        if watched is not None:
            watched.engine, watched.weights = engine, weights
        handlers = engine_handlers(engine) | weights.handlers
        info = {"address": endpoint.address}
        driver = await connect_to_driver(ENGINE_ROLE, index, info, handlers, wire=api_wire(), secret=secret)
        weights.driver = driver
        driver.closed.add_done_callback(lambda _: ended.set())
        await ended.wait()
        await endpoint.close()
        await engine.aclose()


class _WeightsFromDriver:
    """Published weights are fetched to this host, if they are not there, before the engine takes them."""

    def __init__(self, engine: ServedEngine, place: Path, secret: bytes) -> None:
        self.driver: Channel | None = None
        """Set once it is connected; its first call may come before that."""
        self.handlers: dict[str, Handler] = {"stage_weights": self._stage, "update_weights": self._update}
        self.waits = Waits()
        self._engine = engine

        # Not over the channel that the driver's calls come on: it is read between two decode steps only.
        def dial(source: str) -> Awaitable[Channel]:
            return connect(source or driver_address(), wire=api_wire(), peer="who has the weights", secret=secret)

        self._host = HostWeights(shared() or place, place, dial, self._report)
        self._staged: tuple[WeightUpdate, WeightUpdate] | None = None
        """What was published, and the same on this host."""

    async def _stage(self, update: WeightUpdate) -> None:
        with self.waits.entered(f"fetches the weights of version {update.version} to its host"):
            here = await self._host.fetch(update)
        try:
            with self.waits.entered(f"checks the weights of version {update.version}"):
                await self._engine.stage_weights(here)
        except WeightMismatch:
            if here is update:
                raise
            here = await self._host.fetch(update, distrust=True)
            await self._engine.stage_weights(here)
        self._staged = (update, here)

    async def _update(self, update: WeightUpdate) -> None:
        if self._staged is None or self._staged[0] != update:
            await self._stage(update)
        assert self._staged is not None
        with self.waits.entered(f"swaps to the weights of version {update.version}"):
            await self._engine.update_weights(self._staged[1])

    def _report(self) -> None:
        if self.driver is not None and self.driver.is_open:
            self.driver.notify(PROGRESS)


async def serve_by_hand(engine: ServedEngine, address: str, secret: bytes) -> None:
    """Serve runs that name this address, until SIGTERM."""
    ended = _ended(engine)
    endpoint = await serve(
        address,
        lambda channel: _add_handlers(engine, channel),
        wire=api_wire(),
        peer="a run",
        secret=secret,
        roles={GENERATE_ROLE: role_secret(secret, GENERATE_ROLE)},
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
    """The driver of a run and its workers come to the same address."""
    if channel.role == GENERATE_ROLE:
        channel.handlers.update(worker_handlers(engine, channel))
    else:
        channel.handlers.update(engine_handlers(engine, channel))


async def main(words: list[str] | None = None) -> str | None:
    """Returns why the engine failed; None if it was asked to stop."""
    parser = argparse.ArgumentParser(prog="python -m areal.engine.inference.server", description="Serve an engine.")
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--backend", default="embedded", choices=KINDS)
    parser.add_argument("--gpus", type=int, default=1, help="that the model is spread over")
    parser.add_argument("--dtype", default="float32", help="what the embedded engine computes in")
    parser.add_argument("--device", default="auto", help="where the embedded engine computes")
    parser.add_argument("--kernel", default="auto", choices=get_args(Kernel), help="what computes its steps")
    parser.add_argument("--python", default="", help="the interpreter that has vLLM or SGLang; left out = this one")
    parser.add_argument("--engine-arg", action="append", default=[], help="a further one of vLLM's or SGLang's server")
    parser.add_argument("--url", default="", help="of a vLLM or SGLang server that runs already")
    parser.add_argument("--index", type=int, default=0, help="which engine of its run it is")
    parser.add_argument("--listen", help="serve at unix:PATH or tcp:HOST:PORT, without a driver")
    parser.add_argument("--secret-file", help=f"for --listen; left out = the secret is in {ENGINE_SECRET_VARIABLE}")
    given = parser.parse_args(words)
    secret, watched = b"", _Watched()
    if given.listen is not None:
        secret = find_key(None, given.secret_file, ENGINE_SECRET_VARIABLE, "the engine's secret").encode()
        os.environ.pop(ENGINE_SECRET_VARIABLE, None)
        require(
            bool(secret) or given.listen.startswith("unix:"),
            f"{given.listen} can be reached by others and needs a secret; put one into {ENGINE_SECRET_VARIABLE} or "
            "--secret-file, there and in the run",
        )
    else:
        secret = read_secret()
        start_answering(secret, watched.doing)
    model = given.model if given.listen is not None else await _model_of_run(given.model, secret)
    options = EngineOptions(
        model,
        given.dtype,
        given.device,
        given.kernel,
        given.gpus,
        with_weights=model == given.model,
        python=given.python,
        arguments=given.engine_arg,
        url=given.url,
        scratch=scratch(),
    )
    engine = await _opened(given.backend, options)
    if engine is None:
        return None
    garbage.settle()
    if given.listen is not None:
        await serve_by_hand(engine, given.listen, secret)
    else:
        await serve_in_run(engine, given.index, secret, watched)
    return engine.failure


async def _model_of_run(directory: Path, secret: bytes) -> Path:
    """The model's directory; on a host that does not have it, a copy of its files without the weights."""
    if is_here(directory):
        return directory
    driver = await connect(driver_address(), wire=api_wire(), peer="the driver", secret=secret)
    try:
        return await local_model(driver, directory)
    finally:
        await driver.close()


if __name__ == "__main__":
    os.nice(NICENESS)
    try:
        sys.exit(asyncio.run(main()))
    except ArealError as error:
        sys.exit(f"{type(error).__name__}: {error}")
