"""The engine that needs nothing else: continuous batching in one process and one event loop.

It owns the decode loop, weight swaps and pauses. Which sequences share a step is the scheduler's business, how logits
are computed the runner's.

Invariants:
- One step at a time, and only steps touch the runner. Between two steps the event loop serves callers, so requests join
  and leave, weights are swapped and pauses begin there, without locks.
- Every token but a sequence's last is in the cache.
- A step computes a token for every running sequence and a bounded number of prompt tokens, so a long prompt does not
  stall other requests.
- After a weight swap running sequences join again: their tokens are recomputed under the new weights before the next
  one is drawn, so a token's log-prob is exactly that of the version recorded with it.
- A failure costs the request that caused it. After a step that failed for all, everything is computed again in an empty
  cache, and those that joined in that step join one at a time: a request that fails alone is to blame. The
  engine itself is to blame, and ends, when it cannot compute a single token any more.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import torch

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineError, EngineGone
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason, TokenChunk
from areal.api.messages import Array
from areal.engine.inference.asked_logits import steered, tell_alternatives
from areal.engine.inference.grammar import GrammarCompiler
from areal.engine.inference.model_runner import (
    MixedRunner,
    ModelRunner,
    Piece,
    PreparingRunner,
    SamplingRunner,
    WholePrompts,
)
from areal.engine.inference.sampler import sample
from areal.engine.inference.scheduler import StepScheduler
from areal.engine.inference.sequence import PROCESS_ENDS, SequenceState
from areal.engine.model.live import LiveWeights, StagedWeights
from areal.engine.model.published import digest_of_tensors
from areal.utils.logging import getLogger

logger = getLogger("engine")

SMALL_WEIGHTS_BYTES = 16 << 20
"""Fewer bytes of weights than these are checked sooner than a thread would begin to."""
MAX_FAILURES = 3
"""Failed steps in a row, after each of which a single token could not be computed either: then the engine ends."""
MAX_FAILURES_ALONE = 2
"""Failed steps that a request may be the only suspect of; it fails with the last of them."""
MAX_FAILURES_TOGETHER = 4
"""The same where others are suspected with it."""

_NOTHING = torch.empty(0, dtype=torch.int64)
_IMPOSSIBLE = -math.inf
"""The log-prob of a token that cannot be drawn."""


class EmbeddedEngine:
    """Implements `InferenceEngine` on a model in this process."""

    def __init__(self, runner: ModelRunner, tokenizer: Any = None, *, version: int = 0, max_running: int = 256) -> None:
        """`tokenizer` is needed for stop texts and grammars only."""
        self.tokens_generated = 0
        self.failure: str | None = None
        """Why the engine has failed permanently; None while it has not."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when it has."""
        self._runner = runner
        self._mixed = runner if isinstance(runner, MixedRunner) else WholePrompts(runner)
        self._sample = runner.sample if isinstance(runner, SamplingRunner) else sample
        self._scheduler = StepScheduler(self._mixed, max_running)
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer, runner.vocab_size)
        self._weights = LiveWeights(runner)
        self._staged: StagedWeights | None = None
        self._prepared: tuple[StagedWeights, object] | None = None
        """What the runner has made of them already."""
        self._version = version
        self._digests = {version: digest_of_tensors(runner.named_weights())}
        self._loop: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        """Set while there is something to compute and the engine is not paused."""
        self._paused = False
        self._ended: str | None = None
        """Why the engine serves no requests any more."""
        self._failed_steps = 0
        """In a row."""
        self._activity = _Activity()
        self._pauses: list[float] = []
        self._pause_began: float | None = None
        self._swaps: list[float] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        sequence = await self._admit(req)
        try:
            return await sequence.done
        except asyncio.CancelledError:
            self._scheduler.abort(sequence)
            raise

    def start(self, req: ModelRequest) -> SequenceState:
        """Begin an answer that nobody reads token by token: no task has to wait for it, its `done` tells of its end.

        Cancelling `done` ends it. Not for a request with a grammar, which may have to be compiled first.
        """
        assert req.grammar is None
        sequence = self._enter(self._new_sequence(req), req)
        sequence.done.add_done_callback(lambda done: self._scheduler.abort(sequence) if done.cancelled() else None)
        return sequence

    def drawn_since(self, sequence: SequenceState, number: int) -> TokenChunk | None:
        """What was drawn after the first `number` tokens; None = nothing."""
        sequence.record_version(self._version)
        return sequence.chunk(number, self._digests) if sequence.drawn > number else None

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        sequence = await self._admit(req)
        sent, response = len(sequence.resumed.tokens), None
        try:
            while response is None:
                await sequence.until_grown(every_seconds)
                response = sequence.done.result() if sequence.done.done() else None
                sequence.record_version(self._version)
                if sequence.drawn > sent or response is not None:
                    chunk = sequence.chunk(sent, self._digests, response)
                    sent = sequence.drawn
                    yield chunk
        finally:
            self._scheduler.abort(sequence)

    async def stage_weights(self, update: WeightUpdate) -> None:
        """Map the new weights and check them while generation goes on."""
        self._check_alive()
        if self._weights.size_bytes < SMALL_WEIGHTS_BYTES:
            self._staged = self._weights.stage(update)
            return
        staged, prepared = await asyncio.to_thread(self._stage, update)
        self._check_alive()
        self._staged, self._prepared = staged, (staged, prepared)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Copy the new weights between two steps, checked before."""
        self._check_alive()
        while not self._weights.is_ready(self._staged, update):
            await self.stage_weights(update)
        assert self._staged is not None
        staged, self._staged = self._staged, None
        running, began = self._scheduler.running, time.monotonic()
        if running and self._pause_began is None:
            self._pause_began = began
        for sequence in (*running.sequences, *self._scheduler.restarting):
            sequence.record_version(self._version)
        self._weights.swap(staged)
        if isinstance(self._runner, PreparingRunner) and self._prepared is not None and self._prepared[0] is staged:
            self._runner.adopt(self._prepared[1])
        self._prepared = None
        self._version = update.version
        self._digests[update.version] = update.digest
        self._scheduler.restart()
        self._swaps.append(time.monotonic() - began)

    def _stage(self, update: WeightUpdate) -> tuple[StagedWeights, object]:
        """In a thread: what takes long must not be left for the swap, which requests wait for."""
        staged = self._weights.stage(update)
        runner = self._runner
        return staged, runner.prepare(staged.pairs) if isinstance(runner, PreparingRunner) else None

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
        begun = (*self._scheduler.running.sequences, *self._scheduler.restarting)
        return EngineHealth(
            version=self._version,
            digest=self._digests[self._version],
            running=sum(not sequence.done.done() for sequence in begun),
            waiting=self._scheduler.waiting,
            paused=self._paused,
        )

    def activity(self) -> list[tuple[float, float]]:
        """Intervals (monotonic seconds) in which tokens were produced, since the last call."""
        return self._activity.take()

    def pauses(self) -> list[float]:
        """For how many seconds each change of weights held up running requests, since the last call: the copy, and
        until all of them were computed again under the new weights."""
        pauses, self._pauses = self._pauses, []
        return pauses

    def swaps(self) -> list[float]:
        """The part of it in which nothing could be computed: how many seconds each change of weights took."""
        swaps, self._swaps = self._swaps, []
        return swaps

    def cpu_seconds(self) -> float:
        return time.process_time()

    async def aclose(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self._end("the engine was closed")

    async def _admit(self, req: ModelRequest) -> SequenceState:
        sequence = self._new_sequence(req)
        if req.grammar is not None:
            sequence.grammar = await self._grammars.begin(req.grammar)
            self._check_alive()
        return self._enter(sequence, req)

    def _new_sequence(self, req: ModelRequest) -> SequenceState:
        self._check_alive()
        runner = self._runner
        sequence = SequenceState.of(
            req, vocab_size=runner.vocab_size, max_positions=runner.max_positions, tokenizer=self._tokenizer
        )
        runner.check(req.input_ids, req.images)
        return sequence

    def _enter(self, sequence: SequenceState, req: ModelRequest) -> SequenceState:
        """Let it wait for its first step, unless its answer is complete."""
        reason = None if req.drawn is None else sequence.resume(req.drawn, self._digests)
        if reason is not None:
            sequence.answer(sequence.response(reason, self._digests))
            return sequence
        self._scheduler.add(sequence)
        self._wake()
        return sequence

    def _wake(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._drive())
        if not self._paused and self._scheduler:
            self._work.set()

    async def _drive(self) -> None:
        while True:
            await self._work.wait()
            if self._paused:  # a pause can come between the event and this task's turn
                continue
            try:
                self._step()
                self._failed_steps = 0
            except PROCESS_ENDS:
                raise
            except BaseException as error:
                logger.exception("a decode step failed")
                self._recover(error)
                if self.failure is not None:
                    return
            await asyncio.sleep(0)

    def _recover(self, error: BaseException) -> None:
        """Go on after a failed step, without the requests that are at fault for it."""
        self._failed_steps += 1
        suspects = self._scheduler.start_over()
        if not self._computes_one_token() or not suspects:
            if self._failed_steps >= MAX_FAILURES:
                self.failure = f"the engine failed: {error!r}"
                self._end(self.failure)
                self.on_failure()
            return
        for sequence in suspects:
            sequence.failures += 1
            if sequence.failures >= (MAX_FAILURES_ALONE if len(suspects) == 1 else MAX_FAILURES_TOGETHER):
                sequence.fail(error)

    def _computes_one_token(self) -> bool:
        """Whether the runner works: on a prompt of one token, in a cache that is empty before and after it."""
        try:
            self._runner.reset()
            self._mixed.forward(_NOTHING, _NOTHING, [Piece([0], [0], 0, 1)])
            self._runner.reset()
        except PROCESS_ENDS:
            raise
        except BaseException:
            logger.exception("not even one token can be computed")
            return False
        return True

    def _step(self) -> None:
        """One token for every running sequence and for those whose prompts are complete now."""
        started, before = time.monotonic(), self.tokens_generated
        step = self._scheduler.schedule()
        if len(step.ids) or step.pieces:
            logits = self._mixed.forward(step.ids, step.positions, step.pieces)
            self._draw(step.logits_of_running(logits))
        if not self._scheduler:
            self._work.clear()
        ended = time.monotonic()
        if self._pause_began is not None and not self._scheduler.restarting:
            self._pauses.append(ended - self._pause_began)
            self._pause_began = None
        if self.tokens_generated > before:
            self._activity.note(started, ended)

    def _draw(self, logits: torch.Tensor) -> None:
        """One token for each running sequence; those that end get their answer."""
        batch = self._scheduler.running
        if not batch:
            return
        params, simple, all_drawn = batch.params, batch.simple, True
        banned = None
        if not simple:
            logits = steered(logits, batch.sequences)
            banned = batch.banned(logits)
        tokens, logprobs, sets = sampled = self._sample(logits, params, batch.counts, banned)
        if not simple:
            tell_alternatives(logits, params, batch.sequences, sampled, banned)
        for row, (sequence, token, logprob) in enumerate(zip(batch.sequences, tokens, logprobs, strict=True)):
            if not logprob > _IMPOSSIBLE:  # so that it holds for NaN too
                sequence.fail(
                    EngineError(
                        "the model gives this request no token that can be drawn: its logits are NaN "
                        "or infinite; look at the weights, or at what the prompt holds"
                    )
                )
                all_drawn = False
                continue
            if not (simple or sequence.simple):
                self._append(sequence, token, logprob, sets.get(row))
                continue
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            if token in sequence.stops:
                self._finish(sequence, "stop")
            elif len(sequence.logprobs) >= sequence.gconfig.max_new_tokens:
                self._finish(sequence, "length")
        batch.grow(tokens)
        self.tokens_generated += len(tokens)
        if all_drawn:
            self._scheduler.remove_ended()
            return
        # What is not a number stays in the cache, where it would reach the next owner of its place.
        self._scheduler.start_over()
        self._runner.reset()

    def _append(self, sequence: SequenceState, token: int, logprob: float, left: Array | None) -> None:
        """The same for a sequence that asks for more than a length and stop tokens."""
        reason = None
        if not sequence.done.done():
            try:
                reason = sequence.append(token, logprob, self._version, left)
            except PROCESS_ENDS:
                raise
            except BaseException as error:
                sequence.fail(error)
        if reason is not None:
            self._finish(sequence, reason)
        elif sequence.done.done():
            self._scheduler.some_ended = True

    def _finish(self, sequence: SequenceState, reason: StopReason) -> None:
        sequence.record_version(self._version)
        sequence.answer(sequence.response(reason, self._digests))
        self._scheduler.some_ended = True

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise EngineGone(self._ended)

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        for sequence in self._scheduler.clear():
            sequence.fail(EngineGone(why))


_MERGE_GAP_SECONDS = 0.005
"""Steps closer than this count as one interval."""
_MAX_INTERVALS = 100_000
"""The oldest are dropped beyond this."""


class _Activity:
    """When the engine was producing tokens."""

    def __init__(self) -> None:
        self._intervals: deque[tuple[float, float]] = deque(maxlen=_MAX_INTERVALS)

    def note(self, start: float, end: float) -> None:
        if self._intervals and start - self._intervals[-1][1] < _MERGE_GAP_SECONDS:
            start = self._intervals.pop()[0]
        self._intervals.append((start, end))

    def take(self) -> list[tuple[float, float]]:
        """Intervals since the last call."""
        intervals = list(self._intervals)
        self._intervals.clear()
        return intervals
