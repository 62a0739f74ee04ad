"""An engine in another process, over a channel: `RemoteEngine` at the caller's end, `engine_handlers` at the engine's.

Tokens arrive while they are drawn, also those of calls that do not stream: gathered, a few times a second, for all of
them at once. So when the engine ends, what it had drawn by then is known, and another engine can go on from there. All
that one decode step draws for streams travels in one message. A call returns the whole answer after its last tokens,
without the prompt, which the caller has.

Of a long prompt that goes on from an earlier one of its session, only what is new travels. Both ends keep the latest of
each session, as far as there is room, with the number of the call that it came with; a call names the one that its
prompt begins with. An engine that does not have that one, for whatever reason, says so and is sent the whole prompt.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineGone, RequestError
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.infra.rpc.channel import Channel, ChannelClosed, Handler
from areal.utils import waits
from areal.utils.bounded_cache import BoundedCache
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
SHORTEST_KEPT = 512
"""Prompts of fewer tokens travel whole: keeping them would cost more than packing them."""
MOST_KEPT = 1 << 20
"""Tokens of prompts that each end of a channel keeps; at the engine's they take 36 bytes each."""
_TOKENS = "tokens"
"""The message with streamed tokens: a list of [stream, tokens, logprobs, versions, alternatives], each followed by the
`TokenChunk.sets` if there are any; and the versions' digests."""


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
        self._sent = _Prompts()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        stream, inbox = self._open_stream(req)
        try:
            return await self._answer("agenerate", stream, req)
        except EngineGone as gone:
            raise EngineGone(str(gone), inbox.take()) from None
        finally:
            del self._streams[stream]

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        stream, inbox = self._open_stream(req)
        call = asyncio.ensure_future(self._answer("astream", stream, req, every_seconds))
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

    async def _answer(self, method: str, stream: int, req: ModelRequest, *how: Any) -> ModelResponse:
        before, new = self._sent.shorten(stream, req)
        answer: ModelResponse | None = await self._call(method, stream, new, before, *how, timeout_seconds=None)
        if answer is None:
            answer = await self._call(method, stream, req, None, *how, timeout_seconds=None)
            assert answer is not None, "a whole prompt is always known"
        answer.input_tokens = req.input_ids[:]
        return answer

    def _open_stream(self, req: ModelRequest) -> "tuple[int, _Inbox]":
        stream = next(self._numbers)
        inbox = self._streams[stream] = _Inbox(0 if req.drawn is None else len(req.drawn.tokens))
        return stream, inbox

    def _receive(self, parcels: list[Any], digests: dict[int, str]) -> None:
        for stream, tokens, logprobs, versions, alternatives, *sets in parcels:
            if stream in self._streams:  # otherwise its reader is gone, and the cancelled call stops the engine
                self._streams[stream].add(TokenChunk(tokens, logprobs, versions, None, digests, alternatives, *sets))

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


class _Prompts:
    """The latest long prompt of each session that went over a channel, at either of its ends."""

    def __init__(self) -> None:
        self._kept: BoundedCache[str, tuple[int, list[int]]] = BoundedCache(MOST_KEPT, size=lambda kept: len(kept[1]))
        """By session: the number of the call, and the ids."""

    def shorten(self, call: int, req: ModelRequest) -> tuple[int | None, ModelRequest]:
        """At the caller's end: the call whose prompt this one begins with, and the request with what is new of it."""
        kept = self._kept.get(req.session)
        self._keep(call, req)
        if kept is None:
            return None, req
        earlier, beginning = kept
        if req.input_ids[: len(beginning)] != beginning:
            return None, req
        new = copy(req)
        new.input_ids = req.input_ids[len(beginning) :]
        return earlier, new

    def complete(self, call: int, req: ModelRequest, earlier: int | None) -> bool:
        """At the engine's end: put the beginning before what is new; False = it is not known."""
        if earlier is not None:
            kept = self._kept.get(req.session)
            if kept is None or kept[0] != earlier:
                return False
            req.input_ids = kept[1] + req.input_ids
        self._keep(call, req)
        return True

    def _keep(self, call: int, req: ModelRequest) -> None:
        if req.session and len(req.input_ids) >= SHORTEST_KEPT:
            self._kept.put(req.session, (call, list(req.input_ids)))  # a copy: its owner may change the other


class _Inbox:
    """The tokens of one stream that have arrived and were not taken yet."""

    def __init__(self, drawn: int) -> None:
        """`drawn`: how many tokens the answer had before."""
        self.arrived = asyncio.Event()
        self._arrived_chunk: TokenChunk | None = None
        self._taken = drawn

    @property
    def pending(self) -> bool:
        return self._arrived_chunk is not None and bool(self._arrived_chunk.tokens)

    def add(self, chunk: TokenChunk) -> None:
        if self._arrived_chunk is None:
            self._arrived_chunk = TokenChunk()
        self._arrived_chunk.extend(chunk)
        self.arrived.set()

    def take(self) -> TokenChunk:
        """The tokens that have arrived since the last call."""
        self.arrived.clear()  # the end of the call, which sets it too, is looked at apart
        chunk = self._arrived_chunk or TokenChunk()
        self._arrived_chunk = None
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
            alternatives=response.output_alternatives[at:],
            sets=[] if response.choices is None else response.choices.sets()[at:],
        )


def engine_handlers(engine: Any, channel: Channel | None = None) -> dict[str, Handler]:
    """What a process that holds `engine` answers the driver; to generate it needs the channel for the tokens."""
    verbs = (*CONTROL, "health", "cpu_seconds")
    handlers: dict[str, Handler] = {verb: getattr(engine, verb) for verb in verbs if hasattr(engine, verb)}
    if channel is None:
        return handlers
    sender = _TokenSender(engine, channel)
    return handlers | {"agenerate": sender.agenerate, "astream": sender.astream}


def worker_handlers(engine: Any, channel: Channel) -> dict[str, Handler]:
    """The same for a rollout worker, in which agents run: it may generate, and change nothing."""
    return engine_handlers(engine, channel) | {verb: partial(_refuse, verb) for verb in CONTROL}


def _refuse(verb: str, *args: Any) -> None:
    raise RequestError(f"only the driver of a run may call {verb!r} on an engine; a rollout worker may generate")


class _TokenSender:
    """Answers requests for tokens over a channel, and sends what is drawn before an answer is complete."""

    def __init__(self, engine: Any, channel: Channel) -> None:
        self._engine = engine
        self._starts = hasattr(engine, "drawn_since")
        """Whether it can begin an answer without a task that waits for it."""
        self._channel = channel
        self._parcels: list[list[Any]] = []
        self._digests: dict[int, str] = {}
        self._started: dict[int, _Started] = {}
        """Answers that are gathered, by stream."""
        self._gathering: asyncio.TimerHandle | None = None
        self._received = _Prompts()

    def agenerate(self, stream: int, req: ModelRequest, before: int | None) -> Awaitable[ModelResponse] | None:
        """The whole answer; its tokens are sent a few times a second meanwhile.

        None = the beginning of the prompt, that of the call `before`, is not known here.
        """
        if not self._received.complete(stream, req, before):
            return None
        if not self._starts or req.grammar is not None:
            return self._stream(stream, req, GATHER_SECONDS)
        sequence = self._engine.start(req)
        self._started[stream] = _Started(sequence, 0 if req.drawn is None else len(req.drawn.tokens))
        done: asyncio.Future[ModelResponse] = sequence.done
        done.add_done_callback(lambda _: self._started.pop(stream, None))
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._gather)
        return done

    def astream(
        self, stream: int, req: ModelRequest, before: int | None, every_seconds: float
    ) -> Awaitable[ModelResponse] | None:
        """The same, whose tokens are sent as often as that."""
        return self._stream(stream, req, every_seconds) if self._received.complete(stream, req, before) else None

    async def _stream(self, stream: int, req: ModelRequest, every_seconds: float) -> ModelResponse:
        async with aclosing(self._engine.astream(req, every_seconds=every_seconds)) as chunks:
            async for chunk in chunks:
                if chunk.response is not None:
                    break
                self._send(stream, chunk)
                await self._channel.drain()
        response: ModelResponse = chunk.response
        return response

    def _gather(self) -> None:
        self._gathering = None
        if not self._started:
            return
        self._gathering = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._gather)
        if self._channel.is_full:  # they are sent with the next
            return
        for stream, started in self._started.items():
            chunk = self._engine.drawn_since(started.sequence, started.sent)
            if chunk is not None:
                started.sent += len(chunk.tokens)
                self._send(stream, chunk)

    def _send(self, stream: int, chunk: TokenChunk) -> None:
        if not self._parcels:
            asyncio.get_running_loop().call_soon(self._flush)
        parcel = [stream, chunk.tokens, chunk.logprobs, chunk.versions, chunk.alternatives]
        self._parcels.append([*parcel, chunk.sets] if chunk.sets else parcel)
        self._digests |= chunk.digests

    def _flush(self) -> None:
        parcels, self._parcels = self._parcels, []
        digests, self._digests = self._digests, {}
        if self._channel.is_open:
            self._channel.notify(_TOKENS, parcels, digests)


@dataclass(slots=True)
class _Started:
    """An answer whose tokens are gathered."""

    sequence: Any
    sent: int
    """How many of its tokens the caller knows."""
