"""Engines that are HTTP servers with an interpreter of their own: what those on vLLM and on SGLang have in common.

The server only draws tokens. What may be asked, when an answer ends and which weights a token came from is decided here
with `SequenceState`, as in every other engine: a stop text, for instance, ends an answer here, and the server is told
by closing the connection. So one conformance suite holds for all.

Invariants:
- A request is sent only while the server draws: between `pause` and `resume`, and during a swap of weights, it waits
  here.
- `_version` changes while the server is paused, after what it had drawn before has arrived.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from areal.api.engine_api import EngineHealth, WeightShard, WeightUpdate
from areal.api.errors import EngineError, EngineGone, ModelError, RequestError, WeightMismatch
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason, TokenChunk
from areal.engine.inference.grammar import GrammarCompiler
from areal.engine.inference.sequence import SequenceState
from areal.engine.model.published import WeightReader, whole_digest
from areal.utils.logging import getLogger

logger = getLogger("engine")

CONTROL_SECONDS = 60.0
"""How long a control call may take, a change of weights aside."""
LOAD_SECONDS = 600.0
"""How long a server may take to load weights."""
LOOK_SECONDS = 0.25
"""Between two looks whether a server that starts is ready: it tells nobody."""
STOP_SECONDS = 10.0
"""How long a server may take to end before it is killed."""
TAIL_LINES = 30
"""Lines of a server's output that come with the news of its death."""
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
    finish: str | None = None
    """Why the server draws no more in this call; abort = it was told to stop. None = it goes on."""


class HttpEngine(ABC):
    """Implements `InferenceEngine` but for what a kind of server does in its own way: the abstract methods."""

    def __init__(self, server: "HttpServer", tokenizer: Any, limits: RequestLimits) -> None:
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
        self._activity: list[tuple[float, float]] = []
        self._pauses: list[float] = []
        server.on_death = self._fail

    @abstractmethod
    def check(self, req: ModelRequest) -> None:
        """Refuse what the server cannot honour. Raises RequestError."""

    @abstractmethod
    def draw(self, sequence: SequenceState, req: ModelRequest, *, streamed: bool) -> AsyncGenerator[Drawn, None]:
        """Have the server go on with an answer; closing this aborts it there."""

    @abstractmethod
    async def pause_server(self) -> None:
        """Return when the server draws no tokens."""

    @abstractmethod
    async def resume_server(self) -> None: ...

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
        sent, response = len(sequence.resumed.tokens), None
        try:
            while response is None:
                await sequence.until_grown(every_seconds)
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
        if update.layout != "model":
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
                self.take_label(label_of(update))
                if not self._paused:
                    await self._go_on()
            except BaseException as error:
                self._fail(f"a change of weights to version {update.version} was not completed: {error!r}")
                raise
            self._staged = None
            if running:
                self._pauses.append(time.monotonic() - began)

    async def pause(self) -> None:
        self._check_alive()
        async with self._swap:
            await self._stop_drawing()
            self._paused = True

    async def resume(self) -> None:
        self._check_alive()
        async with self._swap:
            if self._paused:
                await self._go_on()
            self._paused = False

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
        if req.images:
            raise RequestError(
                f"requests with images are not sent to {self.server.name}, got {len(req.images)}; "
                "use rollout.backend=embedded for them"
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
                return EngineGone(f"{error}; {ended}")
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
        """The version of the weights that a server calls so."""
        version, _, digest = label.partition(" ")
        try:
            self._digests[int(version)] = digest
        except ValueError:
            raise EngineError(f"{self.server.name}'s weights must be labelled VERSION DIGEST, got {label!r}") from None
        return int(version)

    def take_label(self, label: str) -> None:
        """The server has these weights now."""
        self._version = self.read_label(label)

    def _append(self, sequence: SequenceState, piece: Drawn, start: int) -> StopReason | None:
        """Append to an answer that had `start` tokens when the server was asked; return why it ends, if it does."""
        reason = None
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            if not logprob > UNSEEN:  # so that it holds for NaN too
                raise EngineError(
                    "the model gives this request no token that can be drawn: its logits are NaN "
                    "or infinite; look at the weights, or at what the prompt holds"
                )
            reason = sequence.append(token, logprob, self._version)
            if reason is not None:
                break
        if piece.versions is not None:
            sequence.versions[start:] = piece.versions[: sequence.drawn - start]
        if piece.tokens:
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

    async def _go_on(self) -> None:
        await self.resume_server()
        self._draws.set()

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


class HttpServer:
    """The connection to an engine's server, and the server's process if it was started here."""

    def __init__(self, name: str, address: str, process: "ServerProcess | None" = None) -> None:
        """`address`: unix:PATH or http://HOST:PORT.

        Each call has a connection of its own: servers close idle ones, and a call that is sent into that moment fails.
        """
        self.name = name
        self.address = address
        self.gone: str | None = None
        """Why it cannot be reached any more, if that is known."""
        self.on_death: Callable[[str], None] = lambda why: None
        self.process = process
        self._watch: asyncio.Task[None] | None = None
        if address.startswith("unix:"):
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(
                address.removeprefix("unix:"), limit=0, force_close=True
            )
            self._base = "http://engine"
        else:
            connector, self._base = aiohttp.TCPConnector(limit=0, force_close=True), address.rstrip("/")
        no_deadline = aiohttp.ClientTimeout(total=None)  # that of a generation is its caller's, control calls have one
        self._session = aiohttp.ClientSession(connector=connector, timeout=no_deadline)

    @classmethod
    async def start(cls, name: str, address: str, process: "ServerProcess", timeout_seconds: float) -> "HttpServer":
        """Waits until the process that was started answers at `address`. Raises EngineError if it does not."""
        server = cls(name, address, process)
        try:
            async with asyncio.timeout(timeout_seconds):
                await server._until_ready(process)
        except BaseException as error:
            await server.close()
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"{name} must be ready within {timeout_seconds:g} s, got no answer; its output ends with\n"
                    f"{process.tail}"
                ) from None
            raise
        server._watch = asyncio.create_task(server._report_death(process))
        return server

    async def _until_ready(self, process: "ServerProcess") -> None:
        while True:
            if process.code is not None:
                raise EngineError(f"{self.name} ended with code {process.code} while it started:\n{process.tail}")
            with suppress(EngineError):
                await self.get("/health")
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _report_death(self, process: "ServerProcess") -> None:
        await process.ended.wait()
        self.gone = f"{self.name} ended with code {process.code}; its output ends with\n{process.tail}"
        self.on_death(self.gone)

    async def get(self, path: str) -> Any:
        return await self._control("GET", path, None, CONTROL_SECONDS)

    async def post(self, path: str, body: Any = None, timeout_seconds: float = CONTROL_SECONDS) -> Any:
        """What the server answers, parsed. Raises EngineError with its message if it refuses."""
        return await self._control("POST", path, body, timeout_seconds)

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The server-sent events that it answers with, parsed; closing this tells the server to stop."""
        try:
            async with self._session.post(self._base + path, data=orjson.dumps(body), headers=_JSON) as response:
                await self._require_ok(response, path)
                rest = b""
                async for block in response.content.iter_any():
                    *whole, rest = (rest + block).split(b"\n\n")
                    for event in whole:
                        text = event.removeprefix(b"data: ")
                        if text == b"[DONE]":
                            return
                        yield orjson.loads(text)
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from None

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._session.close()
        if self.process is not None:
            await self.process.stop()

    async def _control(self, method: str, path: str, body: Any, timeout_seconds: float) -> Any:
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._session.request(method, self._base + path, data=orjson.dumps(body), headers=_JSON) as response,
            ):
                await self._require_ok(response, path)
                answer = await response.read()
        except TimeoutError:
            raise EngineError(f"{self.name} must answer {path} within {timeout_seconds:g} s, it did not") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from None
        return orjson.loads(answer) if answer.startswith((b"{", b"[")) else None

    async def _require_ok(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status != 200:
            raise refusal(f"{self.name} refuses {path}", response.status, await response.text())

    def _unreachable(self, error: BaseException) -> EngineGone:
        return EngineGone(self.gone or f"{self.name} cannot be reached: {error!r}")


_JSON = {"Content-Type": "application/json"}


def refusal(what: str, status: int, text: str) -> EngineError:
    """What a server's error means: the request is impossible, or the server has failed."""
    kind = RequestError if 400 <= status < 500 else EngineError
    return kind(f"{what} with {status}: {text[:500]}")


class ServerProcess:
    """A server that was started here. Its output is passed on; the last lines are kept for the news of its death."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, output: asyncio.StreamReader, owned: AsyncExitStack
    ) -> None:
        self.ended = asyncio.Event()
        self._name = name
        self._process = process
        self._output = output
        self._owned = owned
        """What is released when it has ended, such as its directory."""
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader = asyncio.create_task(self._read())
        self._waiter = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], environ: Mapping[str, str], owned: AsyncExitStack
    ) -> "ServerProcess":
        # A pipe of our own: the end of a process whose output asyncio reads is noticed only when its children end too.
        ours, its = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=its,
                stderr=its,
                env=environ,
                start_new_session=True,  # so that its own children end with it
            )
        except OSError as error:
            os.close(ours)
            await owned.aclose()
            raise EngineError(f"{name} cannot be started with {argv[0]!r}: {error}; set rollout.python") from None
        finally:
            os.close(its)
        output = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb"))
        return cls(name, process, output, owned)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode if self.ended.is_set() else None

    @property
    def tail(self) -> str:
        return "\n".join(self._lines)

    async def stop(self) -> None:
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                self._process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.ended.wait()
        self._kill()
        await self._waiter
        await self._owned.aclose()

    async def _wait(self) -> None:
        await self._process.wait()
        self._kill()  # what it started and left behind, which also holds its output open
        await asyncio.wait((self._reader,), timeout=STOP_SECONDS)
        self._reader.cancel()
        self.ended.set()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        rest = b""
        while block := await self._output.read(1 << 16):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                self._lines.append(text)
                print(f"{self._name}: {text}", file=sys.stderr, flush=True)
            rest = rest[-(1 << 16) :]
