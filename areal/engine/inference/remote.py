"""An engine in another process, over a channel: `RemoteEngine` at the caller's end, `engine_handlers` at the engine's.

Tokens arrive while they are drawn, also those of calls that do not stream: gathered, a few times a second. So when the
engine ends, what it had drawn by then is known, and another engine can go on from there. All that one decode step draws
for streams travels in one message. A call returns the whole answer after its last tokens.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineGone, RequestError
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.infra.rpc.channel import Channel, ChannelClosed, Handler
from areal.utils import waits
from areal.utils.waits import Wait

CONTROL_SECONDS = 60.0
"""How long a control call may take: it is served between two decode steps."""
SILENT_SECONDS = 600.0
"""How long an engine that fetches and verifies weights may report no progress; generation goes on meanwhile. A piece
that does not arrive ends its fetch much sooner; a large model on a busy machine takes minutes to be verified."""
GATHER_SECONDS = 0.25
"""How much drawing a call that does not stream may lose if its engine ends."""
PROGRESS = "progress"
"""The message that a piece of new weights has reached the engine."""
GENERATE_ROLE = "generate"
"""Of a peer that may ask an engine for answers, and control nothing: rollout workers have a secret for it."""
WEIGHT_VERBS = {"stage_weights": "has fetched and checked", "update_weights": "uses"}
"""When the calls that give an engine weights have been answered, for people."""
CONTROL = ("stage_weights", "update_weights", "pause", "resume", "activity", "pauses", "swaps")
"""What only the driver may call."""
_TOKENS = "tokens"
"""The message with streamed tokens: a list of [stream, tokens, logprobs, versions], and the digests of the versions."""


class RemoteEngine:
    """Implements `InferenceEngine`, for as long as the channel is open. The channel belongs to it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        channel.handlers[_TOKENS] = self._receive
        channel.handlers[PROGRESS] = self._progressed
        self._deadlines: dict[asyncio.Timeout, Wait] = {}
        """Of weights on their way, and what waits for them: the next piece puts both off."""
        self._streams: dict[int, _Inbox] = {}
        self._numbers = itertools.count()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        stream, inbox = self._open_stream(req)
        try:
            answer: ModelResponse = await self._call("astream", stream, req, GATHER_SECONDS, timeout_seconds=None)
            return answer
        except EngineGone as gone:
            raise EngineGone(str(gone), inbox.take()) from None
        finally:
            del self._streams[stream]

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        stream, inbox = self._open_stream(req)
        call = asyncio.ensure_future(self._call("astream", stream, req, every_seconds, timeout_seconds=None))
        call.add_done_callback(lambda _: inbox.arrived.set())
        try:
            while not call.done() or (call.exception() is not None and inbox.pending):
                if inbox.pending:  # of an engine that has ended too: what it sent need not be computed again
                    yield inbox.take()
                else:
                    await inbox.arrived.wait()
            yield inbox.rest_of(call.result())
        finally:
            del self._streams[stream]
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def stage_weights(self, update: WeightUpdate) -> None:
        await self._call_with_progress("stage_weights", update, SILENT_SECONDS)

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._call_with_progress("update_weights", update, CONTROL_SECONDS)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def health(self) -> EngineHealth:
        health: EngineHealth = await self._call("health")
        return health

    async def activity(self) -> list[tuple[float, float]]:
        return [(start, end) for start, end in await self._call("activity")]

    async def pauses(self) -> list[float]:
        pauses: list[float] = await self._call("pauses")
        return pauses

    async def swaps(self) -> list[float]:
        swaps: list[float] = await self._call("swaps")
        return swaps

    async def aclose(self) -> None:
        await self.channel.close()

    def _open_stream(self, req: ModelRequest) -> "tuple[int, _Inbox]":
        stream = next(self._numbers)
        inbox = self._streams[stream] = _Inbox(0 if req.drawn is None else len(req.drawn.tokens))
        return stream, inbox

    def _receive(self, parcels: list[Any], digests: dict[int, str]) -> None:
        for stream, tokens, logprobs, versions in parcels:
            if stream in self._streams:  # otherwise its reader is gone, and the cancelled call stops the engine
                self._streams[stream].add(tokens, logprobs, versions, digests)

    async def _call_with_progress(self, method: str, update: WeightUpdate, silent_seconds: float) -> None:
        """It may take as long as it likes while weights arrive at the engine."""
        what = f"waits until {self.channel.peer} {WEIGHT_VERBS[method]} the weights of version {update.version}"
        try:
            with waits.current().entered(what, silent_seconds) as wait:
                async with asyncio.timeout(silent_seconds) as deadline:
                    self._deadlines[deadline] = wait
                    try:
                        await self._call(method, update, timeout_seconds=None)
                    finally:
                        del self._deadlines[deadline]
        except TimeoutError:
            raise TimeoutError(
                f"{self.channel.peer} did not answer {method!r} of version {update.version}, and reported no progress "
                f"for {silent_seconds} s"
            ) from None

    def _progressed(self) -> None:
        now = asyncio.get_running_loop().time()
        for deadline, wait in self._deadlines.items():
            if not deadline.expired():
                wait.put_off()
                deadline.reschedule(now + (wait.limit_seconds or 0.0))

    async def _call(self, method: str, *args: Any, timeout_seconds: float | None = CONTROL_SECONDS) -> Any:
        try:
            return await self.channel.call(method, *args, timeout_seconds=timeout_seconds)
        except ChannelClosed as error:
            raise EngineGone(f"the engine is gone: {error}") from None


class _Inbox:
    """The tokens of one stream that have arrived and were not taken yet."""

    def __init__(self, drawn: int) -> None:
        """`drawn`: how many tokens the answer had before."""
        self.arrived = asyncio.Event()
        self._arrived_chunk = TokenChunk()
        self._taken = drawn

    @property
    def pending(self) -> bool:
        return bool(self._arrived_chunk.tokens)

    def add(self, tokens: list[int], logprobs: list[float], versions: list[int], digests: dict[int, str]) -> None:
        self._arrived_chunk.extend(TokenChunk(tokens, logprobs, versions, digests=digests))
        self.arrived.set()

    def take(self) -> TokenChunk:
        """The tokens that have arrived since the last call."""
        self.arrived.clear()  # the end of the call, which sets it too, is looked at apart
        chunk, self._arrived_chunk = self._arrived_chunk, TokenChunk()
        self._taken += len(chunk.tokens)
        return chunk

    def rest_of(self, response: ModelResponse) -> TokenChunk:
        """The last chunk: the whole answer, and its tokens that were not taken."""
        at = self._taken
        return TokenChunk(
            tokens=response.output_tokens[at:],
            logprobs=response.output_logprobs[at:],
            versions=response.output_versions[at:],
            response=response,
            digests=response.digests,
        )


def engine_handlers(engine: Any, channel: Channel | None = None) -> dict[str, Handler]:
    """What a process that holds `engine` answers the driver; to generate it needs the channel for the tokens."""
    verbs = (*CONTROL, "health", "cpu_seconds")
    handlers: dict[str, Handler] = {verb: getattr(engine, verb) for verb in verbs if hasattr(engine, verb)}
    return handlers if channel is None else handlers | {"astream": _TokenSender(engine, channel).astream}


def worker_handlers(engine: Any, channel: Channel) -> dict[str, Handler]:
    """The same for a rollout worker, in which agents run: it may generate, and change nothing."""
    return engine_handlers(engine, channel) | {verb: partial(_refuse, verb) for verb in CONTROL}


def _refuse(verb: str, *args: Any) -> None:
    raise RequestError(f"only the driver of a run may call {verb!r} on an engine; a rollout worker may generate")


class _TokenSender:
    """Sends the tokens of an engine's streams over a channel."""

    def __init__(self, engine: Any, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._parcels: list[list[Any]] = []
        self._digests: dict[int, str] = {}

    async def astream(self, stream: int, req: ModelRequest, every_seconds: float) -> ModelResponse:
        async with aclosing(self._engine.astream(req, every_seconds=every_seconds)) as chunks:
            async for chunk in chunks:
                if chunk.response is not None:
                    break
                self._send(stream, chunk)
                await self._channel.drain()
        response: ModelResponse = chunk.response
        return response

    def _send(self, stream: int, chunk: TokenChunk) -> None:
        if not self._parcels:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parcels.append([stream, chunk.tokens, chunk.logprobs, chunk.versions])
        self._digests |= chunk.digests

    def _flush(self) -> None:
        parcels, self._parcels = self._parcels, []
        digests, self._digests = self._digests, {}
        if self._channel.is_open:
            self._channel.notify(_TOKENS, parcels, digests)
