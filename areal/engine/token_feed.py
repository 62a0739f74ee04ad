"""Streamed tokens on their way over a channel: gathered at one end, sorted into streams at the other.

All that one decode step draws travels in one message; a stream's call returns the whole answer behind its last tokens.
"""

import asyncio
from contextlib import aclosing
from typing import Any

from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.infra.channel import Channel

TOKENS = "tokens"
"""The message: a list of [stream, tokens, logprobs, versions]."""


class TokenFeed:
    """The engine's end."""

    def __init__(self, engine: Any, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._parcels: list[list[Any]] = []

    async def astream(self, stream: int, req: ModelRequest) -> ModelResponse:
        async with aclosing(self._engine.astream(req)) as chunks:
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

    def _flush(self) -> None:
        parcels, self._parcels = self._parcels, []
        if self._channel.is_open:
            self._channel.notify(TOKENS, parcels)


class Inbox:
    """The caller's end of one stream: what has arrived and was not taken yet."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._pending = TokenChunk([], [], [])
        self._taken = 0

    def add(self, tokens: list[int], logprobs: list[float], versions: list[int]) -> None:
        self._pending.tokens += tokens
        self._pending.logprobs += logprobs
        self._pending.versions += versions
        self.arrived.set()

    def take(self, response: ModelResponse | None) -> TokenChunk:
        """What is new; with the whole answer, everything that was not taken before."""
        self.arrived.clear()
        chunk, self._pending = self._pending, TokenChunk([], [], [])
        if response is not None:
            at = self._taken
            chunk = TokenChunk(
                response.output_tokens[at:], response.output_logprobs[at:], response.output_versions[at:], response
            )
        self._taken += len(chunk.tokens)
        return chunk
