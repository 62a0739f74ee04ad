"""The engine that needs nothing: continuous batching in one event loop.

Invariants:
- One step at a time, and only steps touch the runner; between two steps the event loop serves callers, so requests join
  and leave, weights are swapped and pauses begin there, without locks.
- The i-th running sequence owns cache row i. Every token but a sequence's last is in the cache.
- After a weight swap the cache is recomputed under the new weights before the next token, so a token's log-prob is
  exactly that of the version recorded beside it.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import torch

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineError, RequestError
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.engine.activity import Activity
from areal.engine.grammar import GrammarCompiler
from areal.engine.masks import banned_tokens
from areal.engine.model_runner import ModelRunner
from areal.engine.sampler import Choices, sample
from areal.engine.sequence import Sequence
from areal.engine.weights import PublishedWeights, digest
from areal.utils.logging import getLogger

logger = getLogger("engine")


class EmbeddedEngine:
    """Implements `InferenceEngine` on a model in this process."""

    def __init__(self, runner: ModelRunner, tokenizer: Any = None, *, version: int = 0, max_running: int = 256) -> None:
        """`tokenizer` is needed for stop texts and grammars only."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._version = version
        self._digests = {version: digest(runner.flat)}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._choices: Choices | None = None
        self._cache_is_stale = False
        self._paused = False
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._ended: str | None = None
        self._published = PublishedWeights()
        self._activity = Activity()
        self._grammars = GrammarCompiler(tokenizer, runner.vocab_size)
        self.tokens_generated = 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        sequence = await self._admit(req)
        try:
            return await sequence.done
        except asyncio.CancelledError:
            self._abort(sequence)
            raise

    async def astream(self, req: ModelRequest) -> AsyncGenerator[TokenChunk, None]:
        sequence = await self._admit(req)
        try:
            async for chunk in sequence.chunks():
                yield chunk
        finally:
            self._abort(sequence)

    async def update_weights(self, update: WeightUpdate) -> None:
        self._check_alive()
        self._published.copy(update, self._runner.flat)
        self._version = update.version
        self._digests[update.version] = update.digest
        self._cache_is_stale = True

    async def pause(self) -> None:
        self._check_alive()
        self._paused = True
        self._work.clear()

    async def resume(self) -> None:
        self._check_alive()
        self._paused = False
        self._wake()

    async def health(self) -> EngineHealth:
        self._check_alive()
        return EngineHealth(
            version=self._version,
            digest=self._digests[self._version],
            running=sum(not sequence.done.done() for sequence in self._running),
            waiting=len(self._waiting),
            paused=self._paused,
        )

    def activity(self) -> list[tuple[float, float]]:
        """Stretches of time (monotonic seconds) in which tokens were produced, since the last call."""
        return self._activity.take()

    async def aclose(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self._end("the engine was closed")

    async def _admit(self, req: ModelRequest) -> Sequence:
        self._check_alive()
        runner = self._runner
        sequence = Sequence.of(
            req, vocab_size=runner.vocab_size, max_positions=runner.max_positions, tokenizer=self._tokenizer
        )
        runner.check(req.input_ids, req.images)
        if req.grammar is not None:
            sequence.grammar = await self._grammars.begin(req.grammar)
            self._check_alive()
        self._waiting.append(sequence)
        self._wake()
        return sequence

    def _wake(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._drive())
        if not self._paused and (self._waiting or self._running):
            self._work.set()

    async def _drive(self) -> None:
        while True:
            await self._work.wait()
            if self._paused:  # a pause can come between the event and this task's turn
                continue
            try:
                self._step()
            except Exception as error:
                logger.exception("a decode step failed")
                self._end(f"the engine failed: {error!r}")
                return
            await asyncio.sleep(0)

    def _step(self) -> None:
        """Admit what waits, then one token for every running sequence."""
        started, before = time.monotonic(), self.tokens_generated
        self._drop_finished()
        if self._cache_is_stale and self._running:
            self._prefill(0, self._running, [sequence.ids[:-1] for sequence in self._running])
        self._cache_is_stale = False
        self._prefill_waiting()
        if self._running:
            self._decode_running()
        if not self._running and not self._waiting:
            self._work.clear()
        if self.tokens_generated > before:
            self._activity.note(started, time.monotonic())

    def _prefill_waiting(self) -> None:
        first = len(self._running)
        joining: list[Sequence] = []
        while self._waiting and first + len(joining) < self._max_running:
            sequence = self._waiting.popleft()
            if not sequence.done.done():
                joining.append(sequence)
        if not joining:
            return
        logits = self._prefill(first, joining, [sequence.ids for sequence in joining])
        self._draw(joining, logits, _choices(joining))
        self._running += joining
        self._choices = None
        self._drop_finished()

    def _prefill(self, first: int, sequences: list[Sequence], ids: list[list[int]]) -> torch.Tensor:
        """Fill the cache rows from `first` on."""
        rows = range(first, first + len(sequences))
        return self._runner.prefill(rows, ids, [sequence.images for sequence in sequences])

    def _decode_running(self) -> None:
        last, places = zip(*((sequence.ids[-1], len(sequence.ids) - 1) for sequence in self._running), strict=True)
        logits = self._runner.decode(last, places)
        if self._choices is None:
            self._choices = _choices(self._running)
        self._draw(self._running, logits, self._choices)
        self._drop_finished()

    def _draw(self, sequences: list[Sequence], logits: torch.Tensor, choices: Choices) -> None:
        """One token for each of `sequences`; those that end get their answer."""
        counts = [sequence.drawn for sequence in sequences]
        tokens, logprobs = sample(logits, choices, counts, banned_tokens(sequences, logits))
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if not sequence.done.done():
                self._append(sequence, token, logprob)
        self.tokens_generated += len(sequences)

    def _append(self, sequence: Sequence, token: int, logprob: float) -> None:
        try:
            reason = sequence.append(token, logprob, self._version)
        except RequestError as error:
            sequence.done.set_exception(error)
            return
        if reason is not None:
            sequence.done.set_result(sequence.response(reason, self._digests))

    def _drop_finished(self) -> None:
        """Remove ended sequences; the last row moves into each freed one."""
        row = 0
        while row < len(self._running):
            if not self._running[row].done.done():
                row += 1
                continue
            last = self._running.pop()
            self._choices = None
            if row < len(self._running):
                self._running[row] = last
                self._runner.move(len(self._running), row, len(last.ids))

    def _abort(self, sequence: Sequence) -> None:
        """The caller is gone: a waiting request leaves now, a running one before the next step, a finished one has."""
        sequence.done.cancel()
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise EngineError(self._ended)

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        for sequence in (*self._waiting, *self._running):
            if not sequence.done.done():
                sequence.done.set_exception(EngineError(why))
        self._waiting.clear()
        self._running.clear()


def _choices(sequences: list[Sequence]) -> Choices:
    return Choices.of([(s.temperature, s.gconfig.top_p, s.gconfig.top_k, s.seed) for s in sequences])
