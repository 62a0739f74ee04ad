"""An engine in another process, over a channel: `RemoteEngine` at the caller's end, `engine_handlers` at the engine's.

Streamed tokens are gathered: all that one decode step draws travels in one message. The call of a stream returns the
whole answer after its last tokens.

An engine that died may be started again. Then calls wait for the new connection and are made again there; a request is
complete in itself, so its caller notices nothing. Only a stream whose first tokens have arrived cannot begin again.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineError
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.infra.rpc.channel import Channel, ChannelClosed, Handler

CONTROL_SECONDS = 60.0
"""How long a control call may take: it is served between two decode steps."""
_TOKENS = "tokens"
"""The message with streamed tokens: a list of [stream, tokens, logprobs, versions], and the digests of the versions."""


class RemoteEngine:
    """Implements `InferenceEngine`. The channel belongs to it: streamed tokens arrive there."""

    def __init__(self, channel: Channel | None = None, *, returns: bool = False) -> None:
        """`returns`: whoever made this starts the engine again if it dies, and calls `connect` or `give_up`."""
        self.channel: Channel | None = None
        self._returns = returns
        self._changed = asyncio.Event()
        """Set at the next `connect` or `give_up`."""
        self._streams: dict[int, _Inbox] = {}
        self._numbers = itertools.count()
        if channel is not None:
            self.connect(channel)

    def connect(self, channel: Channel) -> None:
        """Use this connection from now on."""
        channel.handlers[_TOKENS] = self._receive
        self.channel = channel
        self._changed.set()
        self._changed = asyncio.Event()

    def give_up(self) -> None:
        """The engine will not be started again: whoever waits for that gets an EngineError."""
        self._returns = False
        self._changed.set()

    async def until_connected(self) -> Channel:
        """The open connection; waits for one while the engine is being started."""
        while self.channel is None or not self.channel.is_open:
            if not self._returns:
                raise EngineError("the engine is gone")
            await self._changed.wait()
        return self.channel

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response: ModelResponse = await self._call("agenerate", req, timeout_seconds=None)
        return response

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        stream, inbox = next(self._numbers), _Inbox(0 if req.drawn is None else len(req.drawn.tokens))
        self._streams[stream] = inbox
        sent = partial(
            self._call,
            "astream",
            stream,
            req,
            every_seconds,
            timeout_seconds=None,
            may_repeat=lambda: not inbox.begun,
        )
        call = asyncio.ensure_future(sent())
        call.add_done_callback(lambda _: inbox.arrived.set())
        try:
            response: ModelResponse | None = None
            while response is None:
                await inbox.arrived.wait()
                if call.done() and call.exception() is not None and inbox.pending:
                    yield inbox.take(None)  # what arrived before the engine ended need not be computed again
                response = call.result() if call.done() else None
                yield inbox.take(response)
        finally:
            del self._streams[stream]
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def stage_weights(self, update: WeightUpdate) -> None:
        await self._call("stage_weights", update)

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._call("update_weights", update)

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

    async def aclose(self) -> None:
        self.give_up()
        if self.channel is not None:
            await self.channel.close()

    def _receive(self, parcels: list[Any], digests: dict[int, str]) -> None:
        for stream, *parts in parcels:
            if stream in self._streams:  # otherwise its reader is gone, and the cancelled call stops the engine
                self._streams[stream].add(*parts, digests)

    async def _call(
        self,
        method: str,
        *args: Any,
        timeout_seconds: float | None = CONTROL_SECONDS,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> Any:
        while True:
            channel = await self.until_connected()
            try:
                return await channel.call(method, *args, timeout_seconds=timeout_seconds)
            except ChannelClosed as error:
                if not (self._returns and may_repeat()):
                    raise EngineError(f"the engine is gone: {error}") from None


class _Inbox:
    """The tokens of one stream that have arrived and were not taken yet."""

    def __init__(self, drawn: int) -> None:
        """`drawn`: how many tokens the answer had before."""
        self.arrived = asyncio.Event()
        self.begun = False
        """Whether tokens have arrived."""
        self._pending = TokenChunk()
        self._taken = drawn

    @property
    def pending(self) -> bool:
        return bool(self._pending.tokens)

    def add(self, tokens: list[int], logprobs: list[float], versions: list[int], digests: dict[int, str]) -> None:
        self._pending.extend(TokenChunk(tokens, logprobs, versions, digests=digests))
        self.begun = True
        self.arrived.set()

    def take(self, response: ModelResponse | None) -> TokenChunk:
        """The new tokens; with the whole answer, all that were not taken before."""
        self.arrived.clear()
        chunk, self._pending = self._pending, TokenChunk()
        if response is not None:
            at = self._taken
            chunk = TokenChunk(
                tokens=response.output_tokens[at:],
                logprobs=response.output_logprobs[at:],
                versions=response.output_versions[at:],
                response=response,
                digests=response.digests,
            )
        self._taken += len(chunk.tokens)
        return chunk


def engine_handlers(engine: Any, channel: Channel | None = None) -> dict[str, Handler]:
    """What a process that holds `engine` answers; streams need the channel that their tokens go back on."""
    verbs = ("agenerate", "stage_weights", "update_weights", "pause", "resume", "health", "activity", "pauses")
    handlers: dict[str, Handler] = {verb: getattr(engine, verb) for verb in verbs if hasattr(engine, verb)}
    return handlers if channel is None else handlers | {"astream": _TokenSender(engine, channel).astream}


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
