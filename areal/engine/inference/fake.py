"""A deterministic engine without a model, for tests of everything around one. Needs no torch.

Its tokens are a function of the prompt and the request's seed, or what `script` says; it produces one token per request
and turn of the event loop, so pauses, weight swaps and cancellations fall between tokens as they do in a real engine.
"""

import asyncio
import hashlib
import math
from collections import abc
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineError, RequestError
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason, TokenChunk
from areal.engine.inference.grammar import GrammarCompiler
from areal.engine.inference.sequence import SequenceState

Script = Callable[[abc.Sequence[int]], abc.Sequence[int]]
"""Prompt ids -> the ids to answer with."""


class FakeEngine:
    """Implements `InferenceEngine`."""

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        max_positions: int = 8192,
        script: Script | None = None,
        tokenizer: Any = None,
    ) -> None:
        """`tokenizer` is needed for stop texts and grammars only. A script's end is a stop, whatever its last token."""
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._script = script
        self._tokenizer = tokenizer
        self._version = 0
        self._digests = {0: "fake-0"}
        self._going = asyncio.Event()
        self._going.set()
        self._sequences: set[SequenceState] = set()
        self._closed = False
        self._grammars = GrammarCompiler(tokenizer, vocab_size)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        with self._admitted(req) as (sequence, scripted):
            reason = None
            while reason is None:
                reason = await self._draw(sequence, scripted)
            return sequence.response(reason, self._digests)

    async def astream(self, req: ModelRequest) -> AsyncGenerator[TokenChunk, None]:
        with self._admitted(req) as (sequence, scripted):
            reason = None
            while reason is None:
                reason = await self._draw(sequence, scripted)
                response = None if reason is None else sequence.response(reason, self._digests)
                yield sequence.chunk(sequence.drawn - 1, response)

    async def update_weights(self, update: WeightUpdate) -> None:
        self._check_alive()
        self._version = update.version
        self._digests[update.version] = update.digest

    async def pause(self) -> None:
        self._check_alive()
        self._going.clear()

    async def resume(self) -> None:
        self._check_alive()
        self._going.set()

    async def health(self) -> EngineHealth:
        self._check_alive()
        running = sum(sequence.drawn > 0 for sequence in self._sequences)
        return EngineHealth(
            version=self._version,
            digest=self._digests[self._version],
            running=running,
            waiting=len(self._sequences) - running,
            paused=not self._going.is_set(),
        )

    async def aclose(self) -> None:
        self._closed = True
        self._going.set()

    @contextmanager
    def _admitted(self, req: ModelRequest) -> Iterator[tuple[SequenceState, list[int] | None]]:
        """The request on its way, and what to answer if that is scripted."""
        self._check_alive()
        sequence = SequenceState.of(
            req, vocab_size=self._vocab_size, max_positions=self._max_positions, tokenizer=self._tokenizer
        )
        if req.grammar is not None:
            sequence.grammar = self._grammars.begin_now(req.grammar)
        self._sequences.add(sequence)
        try:
            yield sequence, list(self._script(req.input_ids)) if self._script else None
        finally:
            self._sequences.discard(sequence)

    async def _draw(self, sequence: SequenceState, scripted: list[int] | None) -> StopReason | None:
        await asyncio.sleep(0)
        while not self._going.is_set():  # it may be cleared again before this task's turn
            await self._going.wait()
        self._check_alive()
        if scripted is not None:
            return self._draw_scripted(sequence, scripted)
        return sequence.append(self._token(sequence), self._logprob(sequence), self._version)

    def _draw_scripted(self, sequence: SequenceState, scripted: list[int]) -> StopReason | None:
        """A script may draw stop tokens early, but not break a grammar."""
        token, last = scripted[sequence.drawn], sequence.drawn + 1 == len(scripted)
        grammar = sequence.grammar
        if grammar is not None and not grammar.allowed(sequence.stops)[token]:
            raise RequestError(f"the script's token {sequence.drawn} breaks {grammar.origin}; script what it allows")
        reason = sequence.append(token, self._logprob(sequence), self._version)
        if last and reason is None and grammar is not None and not grammar.may_end:
            raise RequestError(f"the script ends before {grammar.origin} does; script a whole answer")
        return "stop" if last else reason

    def _token(self, sequence: SequenceState) -> int:
        token = self._hash(sequence) % self._vocab_size
        banned = sequence.banned(self._vocab_size)
        while banned is not None and banned[token]:
            token = (token + 1) % self._vocab_size
        return token

    def _logprob(self, sequence: SequenceState) -> float:
        return math.log((self._hash(sequence) % 1000 + 1) / 1001)

    def _hash(self, sequence: SequenceState) -> int:
        prompt = sequence.ids[: sequence.prompt_length]
        seed = None if sequence.temperature == 0 else sequence.gconfig.seed
        key = repr((prompt, seed, sequence.drawn)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")
