"""Engines that are HTTP servers with an interpreter of their own: what those on vLLM and on SGLang have in common.

The server only draws tokens. What may be asked, when an answer ends and which weights a token came from is decided here
with `SequenceState`, as in every other engine: a stop text, for instance, ends an answer here, and the server is told
by closing the connection. So one conformance suite holds for all.

Invariants:
- A request is sent only while the server draws: between `pause` and `resume`, and during a swap of weights, it waits
  here.
- `_version` changes while the server is paused, after what it had drawn before has arrived.
- After a change of weights the server is asked for the canary that came with them, before any new request. Answers go
  on meanwhile; whoever changed the weights waits for the verdict.
"""

import asyncio
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from areal.api.engine_api import EngineHealth, WeightLayout, WeightShard, WeightUpdate
from areal.api.errors import EngineError, EngineGone, ModelError, RequestError, WeightMismatch
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason, TokenChunk
from areal.api.messages import Array
from areal.engine.inference.canary import CanaryCheck
from areal.engine.inference.grammar import GrammarCompiler
from areal.engine.inference.http_server import HttpServer, ServerCommand
from areal.engine.inference.sequence import SequenceState
from areal.engine.model.published import WeightReader, whole_digest
from areal.utils.hf_utils import load_hf_tokenizer

LOAD_SECONDS = 600.0
"""How long a server may take to load weights."""
GATHER_SECONDS = 0.005
"""So long a token may wait for those of other streams: the tokens of one step arrive one by one, and are sent together.
"""
BUSY_GAP_SECONDS = 1.0
"""Tokens that arrive closer together than this are of one interval of activity."""
UNSEEN = -9999.0
"""What servers report for log-probs that are no number."""
UNLABELLED = "default"
"""What servers call weights that were not given a label."""


@dataclass(frozen=True)
class RequestLimits:
    """What a request to a model must fit."""

    vocab_size: int
    max_positions: int

    @classmethod
    def of(cls, directory: Path) -> "RequestLimits":
        """Those that the directory's config.json states."""
        try:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            text = config.get("text_config", config)
            return cls(int(text["vocab_size"]), int(text["max_position_embeddings"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{directory}/config.json must state vocab_size and max_position_embeddings, got {error!r}; "
                "use a Hugging Face model directory"
            ) from None


@dataclass
class Drawn:
    """Tokens that a server has sent."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None = None
    """Of all tokens that this call of the server has drawn, once it is complete and says so; None = not known yet."""
    sets: list[Array] | None = None
    """What top_p and top_k left for each of `tokens`, int32, ascending; an empty one = the server does not say. None =
    it was not asked."""
    finish: str | None = None
    """Why the server draws no more in this call; abort = it was told to stop. None = it goes on."""


class HttpEngine(ABC):
    """Implements `InferenceEngine` but for what a kind of server does in its own way: the abstract methods."""

    layouts: tuple[WeightLayout, ...] = ("model",)
    """Of updates that the server takes."""

    def __init__(self, server: HttpServer, tokenizer: Any, limits: RequestLimits) -> None:
        self.failure: str | None = None
        """Why the engine has failed permanently; None while it has not."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when it has."""
        self.server = server
        self.tokenizer = tokenizer
        self._limits = limits
        self._grammars = GrammarCompiler(tokenizer, limits.vocab_size)
        self._version = 0
        self._digests = {0: ""}
        self._reader = WeightReader()
        self._staged: WeightUpdate | None = None
        self._unproven: WeightUpdate | None = None
        """What the server was given last, as long as it was not asked for its canary."""
        self._canaries = CanaryCheck()
        self._swap = asyncio.Lock()
        self._draws = asyncio.Event()
        """Set while the server may be asked for tokens."""
        self._draws.set()
        self._paused = False
        self._ended: str | None = None
        """Why the engine serves no requests any more."""
        self._calls: dict[SequenceState, asyncio.Task[None]] = {}
        """The answers in progress."""
        self._aborted: set[asyncio.Task[None]] = set()
        """Calls that are about to end."""
        self._arrivals = _Arrivals()
        self._activity: list[tuple[float, float]] = []
        self._pauses: list[float] = []
        self._swaps: list[float] = []
        server.on_death = self._fail

    @classmethod
    async def launch(
        cls, command: ServerCommand, directory: Path, owned: AsyncExitStack, timeout_seconds: float
    ) -> Self:
        """Start a server of the model in `directory`; `owned` is released when it has ended.

        Raises EngineError if it does not serve in time.
        """
        return await cls.join(await HttpServer.start(command, owned, timeout_seconds), directory)

    @classmethod
    async def join(cls, server: HttpServer, directory: Path) -> Self:
        """On a server of the model in `directory`, with the weights that it has. The server is closed if that fails."""
        try:
            engine = cls(server, load_hf_tokenizer(directory), RequestLimits.of(directory))
            label = await engine.prepare()
            if label == UNLABELLED:
                label = label_of(await asyncio.to_thread(initial_weights, directory))
                await engine.label_server(label)
            engine._take_label(label)
        except BaseException:
            await server.close()
            raise
        return engine

    @abstractmethod
    async def prepare(self) -> str:
        """Look whether the server can do what it will be asked for; returns what it calls its weights.

        Raises EngineError.
        """

    @abstractmethod
    async def label_server(self, label: str) -> None:
        """Have the server call its weights so."""

    @abstractmethod
    def check(self, req: ModelRequest) -> None:
        """Refuse what the server cannot honour. Raises RequestError."""

    def reports_sets(self, sequence: SequenceState) -> bool:
        """Whether the server says what top_p and top_k leave for this request, so that its answer can be trained."""
        return False

    @abstractmethod
    def draw(self, sequence: SequenceState, req: ModelRequest, *, streamed: bool) -> AsyncGenerator[Drawn, None]:
        """Have the server go on with an answer; closing this aborts it there."""

    @abstractmethod
    async def pause_server(self) -> None:
        """Return when the server draws no tokens."""

    @abstractmethod
    async def resume_server(self) -> None: ...

    @abstractmethod
    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of every token but the first under the present weights, computed now, before other requests."""

    @abstractmethod
    async def load_weights(self, update: WeightUpdate) -> None:
        """Have the paused server use these weights from now on, and nothing that it has computed with others."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        sequence = await self._begin(req, streamed=False)
        try:
            return await sequence.done
        finally:
            self._abort(sequence)

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        sequence = await self._begin(req, streamed=True)
        sequence.done.add_done_callback(lambda _: self._arrivals.note())
        sent, response = len(sequence.resumed.tokens), None
        try:
            while response is None:
                if every_seconds > 0:
                    await sequence.until_grown(every_seconds)
                elif sequence.drawn == sent and not sequence.done.done():
                    await self._arrivals.next()
                response = sequence.done.result() if sequence.done.done() else None
                if sequence.drawn > sent or response is not None:
                    chunk = sequence.chunk(sent, self._digests, response)
                    sent = sequence.drawn
                    yield chunk
        finally:
            self._abort(sequence)

    async def stage_weights(self, update: WeightUpdate) -> None:
        """Check the files while generation goes on."""
        self._check_alive()
        if update.layout not in self.layouts:
            raise WeightMismatch(f"{self.server.name} is given whole models, got an update of layout {update.layout!r}")
        await asyncio.to_thread(self._reader.check, update)
        self._check_alive()
        self._staged = update

    async def update_weights(self, update: WeightUpdate) -> None:
        self._check_alive()
        if self._staged != update:
            await self.stage_weights(update)
        async with self._swap:
            began, running = time.monotonic(), self._running
            try:
                await self._stop_drawing()
                await self.load_weights(update)
                self._take_label(label_of(update))
                self._unproven = update
                proof = None if self._paused else await self._go_on()
            except BaseException as error:
                self._fail(f"a change of weights to version {update.version} was not completed: {error!r}")
                raise
            self._staged = None
            self._swaps.append(time.monotonic() - began)
            if running:
                self._pauses.append(self._swaps[-1])
            await self._prove(proof)

    async def pause(self) -> None:
        self._check_alive()
        async with self._swap:
            await self._stop_drawing()
            self._paused = True

    async def resume(self) -> None:
        self._check_alive()
        async with self._swap:
            proof = await self._go_on() if self._paused else None
            self._paused = False
            await self._prove(proof)

    async def health(self) -> EngineHealth:
        self._check_alive()
        await self.server.get("/health")
        running = self._running
        return EngineHealth(
            version=self._version,
            digest=self._digests[self._version],
            running=running,
            waiting=len(self._calls) - running,
            paused=self._paused,
        )

    def activity(self) -> list[tuple[float, float]]:
        """Intervals (monotonic seconds) in which tokens arrived, since the last call."""
        intervals, self._activity = self._activity, []
        return intervals

    def pauses(self) -> list[float]:
        """For how many seconds each change of weights held up running requests, since the last call."""
        pauses, self._pauses = self._pauses, []
        return pauses

    def swaps(self) -> list[float]:
        """How many seconds each change of weights took, since the last call."""
        swaps, self._swaps = self._swaps, []
        return swaps

    def cpu_seconds(self) -> float:
        """What this process and the server have used, if the server was started here."""
        process = self.server.process
        return time.process_time() + (0.0 if process is None else process.cpu_seconds)

    async def aclose(self) -> None:
        self._end("the engine was closed")
        await self.server.close()
        for call in (calls := [*self._calls.values(), *self._aborted]):
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    @property
    def _running(self) -> int:
        return sum(sequence.drawn > len(sequence.resumed.tokens) for sequence in self._calls)

    async def _begin(self, req: ModelRequest, *, streamed: bool) -> SequenceState:
        self._check_alive()
        limits = self._limits
        sequence = SequenceState.of(
            req, vocab_size=limits.vocab_size, max_positions=limits.max_positions, tokenizer=self.tokenizer
        )
        sequence.engine, sequence.reported = self.server.name, self.reports_sets(sequence)
        if req.images:
            raise RequestError(
                f"requests with images are not sent to {self.server.name}, got {len(req.images)}; "
                "use rollout.backend=embedded for them"
            )
        if req.top_logprobs or req.steering is not None:
            raise RequestError(
                f"top_logprobs, logit_bias and penalties are not asked of {self.server.name}; use "
                "rollout.backend=embedded for them"
            )
        self.check(req)
        if req.grammar is not None:
            sequence.grammar = await self._grammars.begin(req.grammar)
            self._check_alive()
        reason = None if req.drawn is None else sequence.resume(req.drawn, self._digests)
        if reason is not None:  # what was drawn before is the whole answer
            sequence.answer(sequence.response(reason, self._digests))
            return sequence
        # Tokens are taken when they arrive, not when somebody reads them: that tells which weights they came from.
        self._calls[sequence] = asyncio.create_task(self._complete(sequence, req, streamed))
        return sequence

    async def _complete(self, sequence: SequenceState, req: ModelRequest, streamed: bool) -> None:
        """Have an answer drawn to its end."""
        try:
            reason = None
            while reason is None:
                await self._until_drawing()
                reason = await self._draw_on(sequence, req, streamed)
            sequence.answer(sequence.response(reason, self._digests))
        except Exception as error:
            sequence.fail(await self._cause(error))
        finally:
            self._calls.pop(sequence, None)

    async def _draw_on(self, sequence: SequenceState, req: ModelRequest, streamed: bool) -> StopReason | None:
        """One call of the server. Returns why the answer ends; None if the call was ended before it."""
        start, finish = sequence.drawn, None
        async with aclosing(self.draw(sequence, req, streamed=streamed)) as pieces:
            async for piece in pieces:
                finish = piece.finish
                reason = self._append(sequence, piece, start)
                if reason is not None:
                    return reason
        if finish != "abort":
            raise EngineError(f"{self.server.name} ended an answer ({finish}) that was not complete")
        return None

    async def _cause(self, error: Exception) -> Exception:
        """A failure of the server may be its end; then another engine can go on with the request."""
        if not isinstance(error, RequestError | EngineGone):
            try:
                await self.server.get("/health")
            except EngineError as ended:
                error = EngineGone(f"{error}; {ended}")
        if isinstance(error, EngineGone) and self.server.process is None:
            self._fail(str(error))  # the end of a server that was started here is noticed, with its last words
        return error

    def _abort(self, sequence: SequenceState) -> None:
        """Have no more drawn for it, if it has not ended."""
        call = self._calls.pop(sequence, None)
        if call is not None:
            call.cancel()
            self._aborted.add(call)
            call.add_done_callback(self._aborted.discard)

    async def _until_drawing(self) -> None:
        while not self._draws.is_set():
            await self._draws.wait()
        self._check_alive()

    def read_label(self, label: str) -> int:
        """The version of the weights that a server calls so. Raises EngineGone for a server that lost its weights."""
        if label == UNLABELLED:
            self._fail(f"{self.server.name} was started again, without the weights of version {self._version}")
            self._check_alive()
        version, _, digest = label.partition(" ")
        try:
            self._digests[int(version)] = digest
        except ValueError:
            raise EngineError(f"{self.server.name}'s weights must be labelled VERSION DIGEST, got {label!r}") from None
        return int(version)

    def _take_label(self, label: str) -> None:
        """The server has these weights now."""
        self._version = self.read_label(label)

    def _append(self, sequence: SequenceState, piece: Drawn, start: int) -> StopReason | None:
        """Append to an answer that had `start` tokens when the server was asked; return why it ends, if it does."""
        reason = None
        sets: Sequence[Array | None] = [None] * len(piece.tokens) if piece.sets is None else piece.sets
        for token, logprob, left in zip(piece.tokens, piece.logprobs, sets, strict=True):
            if not logprob > UNSEEN:  # so that it holds for NaN too
                raise EngineError(
                    "the model gives this request no token that can be drawn: its logits are NaN "
                    "or infinite; look at the weights, or at what the prompt holds"
                )
            reason = sequence.append(token, logprob, self._version, left)
            if reason is not None:
                break
        if piece.versions is not None:
            sequence.versions[start:] = piece.versions[: sequence.drawn - start]
        if piece.tokens:
            self._arrivals.note()
            self._note_activity(time.monotonic())
        return reason

    def _note_activity(self, now: float) -> None:
        if self._activity and now - self._activity[-1][1] < BUSY_GAP_SECONDS:
            self._activity[-1] = (self._activity[-1][0], now)
        else:
            self._activity.append((now, now))

    async def _stop_drawing(self) -> None:
        self._draws.clear()
        if not self._paused:
            await self.pause_server()

    async def _go_on(self) -> asyncio.Task[list[float]] | None:
        """Returns the answer to come for `_prove`."""
        canary = None if self._unproven is None else self._unproven.canary
        # Asked before the server goes on, it is the first in the queue, and held up by nothing that is in progress.
        proof = None if canary is None else asyncio.create_task(self.score(canary.tokens))
        try:
            await self.resume_server()
        except BaseException:
            if proof is not None:
                proof.cancel()
            raise
        self._draws.set()
        return proof

    async def _prove(self, proof: asyncio.Task[list[float]] | None) -> None:
        """Raises WrongWeights if the server does not compute with the weights that it was given."""
        if proof is None or self._unproven is None:
            return
        try:
            found = await proof
        finally:
            proof.cancel()
        self._canaries.check(self.server.name, self._unproven, found)
        self._unproven = None

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise EngineGone(self._ended)

    def _fail(self, why: str) -> None:
        if self._ended is None:
            self.failure = why
            self._end(why)
            self.on_failure()

    def _end(self, why: str) -> None:
        self._ended = self.server.gone = self._ended or why
        for sequence in self._calls:
            sequence.fail(EngineGone(self._ended))


class _Arrivals:
    """Wakes all streams together, a moment after something has arrived for any of them."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._waited_for = False
        self._noted = False

    def note(self) -> None:
        if self._waited_for and not self._noted:
            self._noted = True
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._wake)

    async def next(self) -> None:
        self._waited_for = True
        await self._next.wait()

    def _wake(self) -> None:
        woken, self._next = self._next, asyncio.Event()
        self._waited_for = self._noted = False
        woken.set()


def seed_of(sequence: SequenceState) -> int:
    """The seed of the server's next call. A call begins its seed's stream anew, so one that goes on needs another."""
    if sequence.drawn == 0:
        return sequence.seed
    digest = hashlib.blake2b(f"{sequence.seed} {sequence.drawn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)


def label_of(update: WeightUpdate) -> str:
    """What a server calls these weights."""
    return f"{update.version} {update.digest}"


def initial_weights(directory: Path) -> WeightUpdate:
    """Those that a server loaded when it started."""
    shards = []
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        shards.append(WeightShard(path.name, path.stat().st_size, digest))
    return WeightUpdate(0, whole_digest(shards), str(directory), tuple(shards))
