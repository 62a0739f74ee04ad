"""The engine that needs nothing: continuous batching in one event loop.

Invariants:
- One step at a time, and only steps touch the runner; between two steps the event loop serves callers, so requests join
  and leave, weights are swapped and pauses begin there, without locks.
- The i-th running sequence owns cache row i. Every token but a sequence's last is in the cache.
- After a weight swap the cache is recomputed under the new weights before the next token, so a token's log-prob is
  exactly that of the version recorded beside it.
"""

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import ContextLengthError, EngineError, RequestError, WeightMismatch
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason
from areal.config.generation import GenerationHyperparameters
from areal.engine.runner import Runner
from areal.engine.sampler import Choices, sample
from areal.engine.weights import SharedWeights, digest

MERGE_GAP_SECONDS = 0.005
"""Steps closer than this count as one stretch of activity."""


@dataclass(eq=False)
class Sequence:
    """One request on its way."""

    gconfig: GenerationHyperparameters
    ids: list[int]
    """Prompt, then what was sampled."""
    done: asyncio.Future[ModelResponse]
    prompt_length: int
    stops: frozenset[int]
    seed: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def drawn(self) -> int:
        return len(self.logprobs)

    @property
    def temperature(self) -> float:
        return 0.0 if self.gconfig.greedy else self.gconfig.temperature


class EmbeddedEngine:
    """Implements `InferenceEngine` on a Runner in this process."""

    def __init__(self, runner: Runner, tokenizer: Any = None, *, version: int = 0, max_running: int = 256) -> None:
        """`tokenizer` is needed for stop texts only."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._version = version
        self._digests = {version: digest(runner.decoder.flat)}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._choices: Choices | None = None
        self._cache_is_stale = False
        self._paused = False
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._maps: dict[str, SharedWeights] = {}
        self._activity: deque[tuple[float, float]] = deque(maxlen=100_000)
        self.tokens_generated = 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self._check_alive()
        sequence = self._admit(req)
        self._waiting.append(sequence)
        self._wake()
        try:
            return await sequence.done
        except asyncio.CancelledError:
            self._abort(sequence)
            raise

    async def update_weights(self, update: WeightUpdate) -> None:
        self._check_alive()
        flat = self._map(update.path)
        if digest(flat) != update.digest:
            raise WeightMismatch(f"the weights of version {update.version} in {update.path} do not have their digest")
        self._runner.decoder.flat.copy_(flat)
        self._version = update.version
        self._digests[update.version] = update.digest
        self._cache_is_stale = bool(self._running)

    async def pause(self) -> None:
        self._paused = True
        self._work.clear()

    async def resume(self) -> None:
        self._paused = False
        self._wake()

    async def health(self) -> EngineHealth:
        self._check_alive()
        return EngineHealth(
            version=self._version,
            digest=self._digests[self._version],
            running=len(self._running),
            waiting=len(self._waiting),
            paused=self._paused,
        )

    def activity(self) -> list[tuple[float, float]]:
        """Stretches of time (monotonic seconds) in which tokens were produced, since the last call."""
        stretches = list(self._activity)
        self._activity.clear()
        return stretches

    async def aclose(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self._fail(EngineError("the engine was closed"))

    def _admit(self, req: ModelRequest) -> Sequence:
        g, limit = req.gconfig, self._runner.max_positions
        if len(req.input_ids) + g.max_new_tokens > limit:
            raise ContextLengthError(
                f"a prompt of {len(req.input_ids)} tokens and max_new_tokens={g.max_new_tokens} "
                f"exceed the model's {limit} positions; shorten the prompt or lower max_new_tokens"
            )
        if not all(0 <= token < self._runner.vocab_size for token in req.input_ids):
            raise RequestError(f"input_ids must lie in [0, {self._runner.vocab_size}); a token of another tokenizer?")
        if g.stop and self._tokenizer is None:
            raise RequestError("stop texts need an engine with a tokenizer; use stop_token_ids")
        return Sequence(
            gconfig=g,
            ids=list(req.input_ids),
            done=asyncio.get_running_loop().create_future(),
            prompt_length=len(req.input_ids),
            stops=frozenset(g.stop_token_ids),
            seed=secrets.randbits(63) if g.seed is None else g.seed % 2**64,
        )

    def _wake(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._drive())
        if not self._paused and (self._waiting or self._running):
            self._work.set()

    async def _drive(self) -> None:
        while True:
            await self._work.wait()
            try:
                self._step()
            except Exception as error:
                self._fail(error)
                return
            await asyncio.sleep(0)

    def _step(self) -> None:
        """Admit what waits, then one token for every running sequence."""
        started = time.monotonic()
        self._drop_finished()
        if self._cache_is_stale:
            self._runner.prefill(range(len(self._running)), [sequence.ids[:-1] for sequence in self._running])
            self._cache_is_stale = False
        if self._waiting and len(self._running) < self._max_running:
            self._prefill_waiting()
        if self._running:
            logits = self._runner.decode(
                [sequence.ids[-1] for sequence in self._running], [len(s.ids) - 1 for s in self._running]
            )
            if self._choices is None:
                self._choices = _choices(self._running)
            self._append(self._running, logits, self._choices)
            self._drop_finished()
        if not self._running and not self._waiting:
            self._work.clear()
        self._note_activity(started, time.monotonic())

    def _prefill_waiting(self) -> None:
        room = self._max_running - len(self._running)
        joining = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        first = len(self._running)
        logits = self._runner.prefill(range(first, first + len(joining)), [sequence.ids for sequence in joining])
        self._append(joining, logits, _choices(joining))
        self._running += joining
        self._choices = None
        self._drop_finished()

    def _append(self, sequences: list[Sequence], logits: torch.Tensor, choices: Choices) -> None:
        for row, sequence in enumerate(sequences):
            if sequence.drawn < sequence.gconfig.min_new_tokens and sequence.stops:
                logits[row, list(sequence.stops)] = -torch.inf
        tokens, logprobs = sample(logits, choices, [sequence.drawn for sequence in sequences])
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self._version)
            reason = self._stop_reason(sequence, token)
            if reason is not None and not sequence.done.done():
                sequence.done.set_result(self._response(sequence, reason))
        self.tokens_generated += len(sequences)

    def _stop_reason(self, sequence: Sequence, token: int) -> StopReason | None:
        if token in sequence.stops:
            return "stop"
        if sequence.gconfig.stop and self._ends_with_stop(sequence):
            return "stop"
        return "length" if sequence.drawn >= sequence.gconfig.max_new_tokens else None

    def _ends_with_stop(self, sequence: Sequence) -> bool:
        longest = max(map(len, sequence.gconfig.stop))
        tail = sequence.ids[sequence.prompt_length :][-(longest + 8) :]
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(stop in text for stop in sequence.gconfig.stop)

    def _response(self, sequence: Sequence, reason: StopReason) -> ModelResponse:
        return ModelResponse(
            input_tokens=sequence.ids[: sequence.prompt_length],
            output_tokens=sequence.ids[sequence.prompt_length :],
            output_logprobs=sequence.logprobs,
            output_versions=sequence.versions,
            stop_reason=reason,
            digests={version: self._digests[version] for version in set(sequence.versions)},
        )

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
        """The caller is gone: a waiting request leaves now, a running one before the next step."""
        sequence.done.cancel()
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def _map(self, path: str) -> torch.Tensor:
        if path not in self._maps:
            self._maps[path] = SharedWeights(Path(path), self._runner.decoder.flat.numel())
        return self._maps[path].flat

    def _note_activity(self, start: float, end: float) -> None:
        if self._activity and start - self._activity[-1][1] < MERGE_GAP_SECONDS:
            start = self._activity.pop()[0]
        self._activity.append((start, end))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {self._failure!r}") from self._failure

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        for sequence in (*self._waiting, *self._running):
            if not sequence.done.done():
                sequence.done.set_exception(EngineError(f"the engine failed: {error!r}"))
        self._waiting.clear()
        self._running.clear()


def _choices(sequences: list[Sequence]) -> Choices:
    return Choices.of([(s.temperature, s.gconfig.top_p, s.gconfig.top_k, s.seed) for s in sequences])
