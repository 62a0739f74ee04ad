"""When an engine was producing tokens, as stretches of time."""

# MERGED-DOC
# The engine that needs nothing: continuous batching in one event loop.
#
# Invariants:
# - One step at a time, and only steps touch the runner; between two steps the event loop serves callers, so requests join
#   and leave, weights are swapped and pauses begin there, without locks.
# - The i-th running sequence owns cache row i. Every token but a sequence's last is in the cache.
# - A step computes a token for every running sequence and a bounded number of prompt tokens: a long prompt stalls nobody.
# - After a weight swap running sequences join again: their tokens are recomputed under the new weights before the next
#   one is drawn, so a token's log-prob is exactly that of the version recorded beside it.

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import torch

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineError, RequestError
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason, TokenChunk
from areal.engine.inference.grammar import GrammarCompiler
from areal.engine.inference.model_runner import MixedRunner, ModelRunner
from areal.engine.inference.sampler import Rows, banned_tokens, sample
from areal.engine.inference.scheduler import StepScheduler, WholePrompts
from areal.engine.inference.sequence import SequenceState
from areal.engine.model.weights import PublishedWeights, digest
from areal.utils.logging import getLogger

MERGE_GAP_SECONDS = 0.005
"""Steps closer than this count as one stretch."""
MAX_STRETCHES = 100_000
"""The oldest are forgotten beyond this."""


class Activity:
    def __init__(self) -> None:
        self._stretches: deque[tuple[float, float]] = deque(maxlen=MAX_STRETCHES)

    def note(self, start: float, end: float) -> None:
        if self._stretches and start - self._stretches[-1][1] < MERGE_GAP_SECONDS:
            start = self._stretches.pop()[0]
        self._stretches.append((start, end))

    def take(self) -> list[tuple[float, float]]:
        """Stretches (in the clock's seconds) since the last call."""
        stretches = list(self._stretches)
        self._stretches.clear()
        return stretches


logger = getLogger("engine")

SMALL_WEIGHTS = 1 << 22
"""Fewer parameters than these are checked sooner than a thread would begin to."""


class EmbeddedEngine:
    """Implements `InferenceEngine` on a model in this process."""

    def __init__(self, runner: ModelRunner, tokenizer: Any = None, *, version: int = 0, max_running: int = 256) -> None:
        """`tokenizer` is needed for stop texts and grammars only."""
        self._runner = runner
        self._mixed = runner if isinstance(runner, MixedRunner) else WholePrompts(runner)
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._version = version
        self._digests = {version: digest(runner.flat)}
        self._admission = StepScheduler(self._mixed)
        self._rows = Rows(max_running)
        self._cache_is_stale = False
        self._someone_ended = False
        self._paused = False
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._ended: str | None = None
        self._published = PublishedWeights()
        self._activity = Activity()
        self._grammars = GrammarCompiler(tokenizer, runner.vocab_size)
        self.tokens_generated = 0
        self._pauses: list[float] = []
        self._pause_began: float | None = None

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
        """Check the new weights while generation goes on, then copy them between two steps."""
        self._check_alive()
        size = self._runner.flat.numel()
        if size < SMALL_WEIGHTS:
            published = self._published.read(update, size)
        else:
            published = await asyncio.to_thread(self._published.read, update, size)
            self._check_alive()
        if self._rows and self._pause_began is None:
            self._pause_began = time.monotonic()
        for sequence in self._rows.sequences:
            sequence.settle(self._version)
        self._runner.flat.copy_(published)
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
            running=sum(not sequence.done.done() for sequence in (*self._rows.sequences, *self._admission.begun)),
            waiting=len(self._admission) - len(self._admission.begun),
            paused=self._paused,
        )

    def activity(self) -> list[tuple[float, float]]:
        """Stretches of time (monotonic seconds) in which tokens were produced, since the last call."""
        return self._activity.take()

    def pauses(self) -> list[float]:
        """For how many seconds each change of weights held up a running request (the copy, and until all of them were
        computed again under the new weights), since the last call."""
        pauses, self._pauses = self._pauses, []
        return pauses

    async def aclose(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self._end("the engine was closed")

    async def _admit(self, req: ModelRequest) -> SequenceState:
        self._check_alive()
        runner = self._runner
        sequence = SequenceState.of(
            req, vocab_size=runner.vocab_size, max_positions=runner.max_positions, tokenizer=self._tokenizer
        )
        runner.check(req.input_ids, req.images)
        if req.grammar is not None:
            sequence.grammar = await self._grammars.begin(req.grammar)
            self._check_alive()
        self._admission.add(sequence)
        self._wake()
        return sequence

    def _wake(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._drive())
        if not self._paused and (self._admission or self._rows):
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
        """One token for every running sequence and for those whose prompts are complete now."""
        started, before = time.monotonic(), self.tokens_generated
        self._remove_ended()
        if self._cache_is_stale:
            self._admission.begin_again(self._rows.clear())
            self._cache_is_stale = False
        first = len(self._rows)
        pieces, joining = self._admission.pieces(first, self._max_running - first)
        if first or pieces:
            ids, positions = self._rows.ids, self._rows.positions
            for sequence in joining:
                self._rows.join(sequence)
            logits = self._mixed.forward(ids, positions, pieces)
            if any(len(piece.rows) > 1 for piece in pieces):  # equal prompts were computed once
                logits = logits[[*range(first), *(first + i for i in self._admission.sources)]]
            self._draw(logits)
        if not self._rows and not self._admission:
            self._work.clear()
        ended = time.monotonic()
        if self._pause_began is not None and not self._admission.begun:
            self._pauses.append(ended - self._pause_began)
            self._pause_began = None
        if self.tokens_generated > before:
            self._activity.note(started, ended)

    def _draw(self, logits: torch.Tensor) -> None:
        """One token for each running sequence; those that end get their answer."""
        rows = self._rows
        if not rows:
            return
        sequences, choices = rows.sequences, rows.choices
        simple = rows.simple
        banned = None if simple else banned_tokens(sequences, logits)
        tokens, logprobs = sample(logits, choices, rows.counts, banned)
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if not (simple or sequence.simple):
                self._append(sequence, token, logprob)
                continue
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            if token in sequence.stops:
                self._finish(sequence, "stop")
            elif len(sequence.logprobs) >= sequence.gconfig.max_new_tokens:
                self._finish(sequence, "length")
        rows.grow(tokens)
        self.tokens_generated += len(tokens)
        self._remove_ended()

    def _append(self, sequence: SequenceState, token: int, logprob: float) -> None:
        """The same for one that asks for more than a length and stop tokens."""
        if sequence.done.done():
            self._someone_ended = True
            return
        try:
            reason = sequence.append(token, logprob, self._version)
        except RequestError as error:
            sequence.done.set_exception(error)
            self._someone_ended = True
            return
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: SequenceState, reason: StopReason) -> None:
        sequence.settle(self._version)
        sequence.done.set_result(sequence.response(reason, self._digests))
        self._someone_ended = True

    def _remove_ended(self) -> None:
        """The last row moves into each that was freed; a later prompt may begin with what an answer ended with."""
        if not self._someone_ended:
            return
        self._someone_ended = False
        rows = self._rows
        for row in reversed(range(len(rows))):  # so that the last row, which moves, is never one that ended
            sequence = rows.sequences[row]
            if not sequence.done.done():
                continue
            if not sequence.done.cancelled() and not self._cache_is_stale:
                self._mixed.remember(row, sequence.ids[:-1])
            moved = rows.leave(row)
            if moved is not None:
                self._mixed.move(moved, row, len(rows.sequences[row].ids))

    def _abort(self, sequence: SequenceState) -> None:
        """The caller is gone: a waiting request leaves now, a running one before the next step, a finished one has."""
        sequence.done.cancel()
        self._admission.discard(sequence)
        self._someone_ended = True

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise EngineError(self._ended)

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        for sequence in (*self._admission.clear(), *self._rows.clear()):
            if not sequence.done.done():
                sequence.done.set_exception(EngineError(why))
