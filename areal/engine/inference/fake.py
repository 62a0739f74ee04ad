"""A deterministic engine without a model, for tests of everything around one. Needs no torch.

Its tokens are a function of the prompt and the request's seed, or what `script` returns. It produces one token per
request and turn of the event loop, so pauses, weight swaps and cancellations fall between tokens as they do in a real
engine. `hold` and `failure` make it slow or broken where a test wants it to be. It has no logits: alternatives and
what top_p and top_k leave are made up, and steering changes nothing.
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineGone, RequestError
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason, TokenChunk
from areal.engine.inference.grammar import GrammarCompiler
from areal.engine.inference.sequence import SequenceState

Script = Callable[[Sequence[int]], Sequence[int]]
"""Prompt ids -> the ids to answer with."""
Failure = Exception | Callable[[ModelRequest], Exception | None]
"""What to raise for every request, or for those where the function returns something."""


class FakeEngine:
    """Implements `InferenceEngine`. What it does next can be changed at any time through its public attributes."""

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        max_positions: int = 8192,
        script: Script | None = None,
        tokenizer: Any = None,
        constrained: bool = True,
        hold: asyncio.Event | None = None,
        failure: Failure | None = None,
        interrupt_at: int = 0,
    ) -> None:
        """`tokenizer` is needed for stop texts and grammars only."""
        self.script = script
        """The end of a script is a stop, whatever its last token; an empty one is an answer without tokens."""
        self.hold = hold
        """Requests wait for this event before token `interrupt_at`."""
        self.failure = failure
        """Requests fail with this before token `interrupt_at`, once they are not held any more."""
        self.interrupt_at = interrupt_at
        """Number of the token; 0 is the first."""
        self.requests: list[ModelRequest] = []
        """All that have come so far."""
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._tokenizer = tokenizer
        self._constrained = constrained
        """False ignores grammars, as engines without constrained decoding do."""
        self._version = 0
        self._digests = {0: "fake-0"}
        self._going = asyncio.Event()
        self._going.set()
        self._sequences: set[SequenceState] = set()
        self._in_flight_changed = asyncio.Event()
        self._closed = False
        self._grammars = GrammarCompiler(tokenizer, vocab_size)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response = None
        async for chunk in self.astream(req):
            response = chunk.response
        assert response is not None
        return response

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(req)
        self._check_alive()
        sequence = SequenceState.of(
            req, vocab_size=self._vocab_size, max_positions=self._max_positions, tokenizer=self._tokenizer
        )
        if req.grammar is not None and self._constrained:
            sequence.grammar = self._grammars.begin_now(req.grammar)
        reason = None if req.drawn is None else sequence.resume(req.drawn, self._digests)
        if reason is not None:  # it was complete
            yield TokenChunk(response=sequence.response(reason, self._digests))
            return
        self._sequences.add(sequence)
        self._in_flight_changed.set()
        try:
            scripted = None if self.script is None else list(self.script(req.input_ids))
            sent = sequence.drawn
            while reason is None:
                await self._turn(req, sequence)
                reason = self._draw(sequence) if scripted is None else self._draw_scripted(sequence, scripted)
                response = None if reason is None else sequence.response(reason, self._digests)
                yield sequence.chunk(sent, self._digests, response)
                sent = sequence.drawn
        finally:
            self._sequences.discard(sequence)
            self._in_flight_changed.set()

    async def stage_weights(self, update: WeightUpdate) -> None:
        self._check_alive()

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
        if self.hold is not None:
            self.hold.set()

    @property
    def in_flight(self) -> int:
        """Requests that have come and not ended, held ones included."""
        return len(self._sequences)

    async def until_in_flight(self, count: int, *, timeout_seconds: float = 20) -> None:
        """Wait until exactly that many requests are in flight."""
        async with asyncio.timeout(timeout_seconds):
            while self.in_flight != count:
                self._in_flight_changed.clear()
                await self._in_flight_changed.wait()

    async def _turn(self, req: ModelRequest, sequence: SequenceState) -> None:
        """Return when the request may draw its next token."""
        await asyncio.sleep(0)
        interrupted = sequence.drawn == self.interrupt_at
        if interrupted and self.hold is not None:
            await self.hold.wait()
        while not self._going.is_set():  # it may be cleared again before this task's turn
            await self._going.wait()
        self._check_alive()
        if interrupted:
            failure = self.failure(req) if callable(self.failure) else self.failure
            if failure is not None:
                raise failure

    def _draw(self, sequence: SequenceState) -> StopReason | None:
        token = self._hash(sequence) % self._vocab_size
        banned = sequence.banned(self._vocab_size)
        while banned is not None and banned[token]:
            token = (token + 1) % self._vocab_size
        return self._append(sequence, token)

    def _append(self, sequence: SequenceState, token: int) -> StopReason | None:
        logprob = self._logprob(sequence)
        if sequence.top_logprobs:
            others = ((token + step) % self._vocab_size for step in range(sequence.top_logprobs))
            sequence.alternatives.append({other: logprob - rank for rank, other in enumerate(others)})
        left = np.unique([token, (token + 1) % self._vocab_size]).astype(np.int32) if sequence.limited else None
        return sequence.append(token, logprob, self._version, left)

    def _draw_scripted(self, sequence: SequenceState, scripted: list[int]) -> StopReason | None:
        """A script may draw stop tokens early, but not break a grammar."""
        if len(scripted) <= sequence.drawn:
            return "stop"
        token, last = scripted[sequence.drawn], sequence.drawn + 1 == len(scripted)
        grammar = sequence.grammar
        if grammar is not None and not grammar.allowed(sequence.stops)[token]:
            raise RequestError(f"the script's token {sequence.drawn} breaks {grammar.origin}; script what it allows")
        reason = self._append(sequence, token)
        if last and reason is None and grammar is not None and not grammar.may_end:
            raise RequestError(f"the script ends before {grammar.origin} does; script a whole answer")
        return "stop" if last else reason

    def _logprob(self, sequence: SequenceState) -> float:
        return math.log((self._hash(sequence) % 1000 + 1) / 1001)

    def _hash(self, sequence: SequenceState) -> int:
        prompt = sequence.ids[: sequence.prompt_length]
        seed = None if sequence.temperature == 0 else sequence.gconfig.seed
        key = repr((prompt, seed, sequence.drawn)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineGone("the engine was closed")
