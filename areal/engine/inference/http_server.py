"""The HTTP server that an engine asks for tokens: its process, if it was started here, and the calls to it.

A `ServerProcess` has an interpreter and a session of its own: what it starts ends with it, and it ends with the process
that started it. `HttpServer` is the way to a server, whoever started it.
"""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from areal.api.errors import EngineError, EngineGone, RequestError
from areal.utils.process_pool.descendants import children_of, die_with_parent

CONTROL_SECONDS = 60.0
"""How long a control call may take, a change of weights aside."""
LOOK_SECONDS = 0.25
"""Between two looks whether a server that starts is ready: it tells nobody."""
STOP_SECONDS = 10.0
"""How long a server may take to end before it is killed."""
TAIL_LINES = 30
"""Lines of a server's output that come with the news of its death."""
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started, and where it is reached then."""

    name: str
    """What people call it."""
    argv: Sequence[str]
    environ: Mapping[str, str]
    address: str
    """unix:PATH or http://HOST:PORT."""


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
    async def start(cls, command: ServerCommand, owned: AsyncExitStack, timeout_seconds: float) -> "HttpServer":
        """Start a server and wait until it answers; `owned` is released when it has ended. Raises EngineError."""
        process = await ServerProcess.start(command, owned)
        server = cls(command.name, command.address, process)
        try:
            async with asyncio.timeout(timeout_seconds):
                await server._until_ready(process)
        except BaseException as error:
            await server.close()
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"{command.name} must be ready within {timeout_seconds:g} s, got no answer; its output ends with\n"
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
        ended = f"{self.name} ended with code {process.code}"
        print(ended, file=sys.stderr, flush=True)  # now: those who wait for this engine may end it before it says why
        self.gone = f"{ended}; its output ends with\n{process.tail}"
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
    async def start(cls, command: ServerCommand, owned: AsyncExitStack) -> "ServerProcess":
        # A pipe of our own: the end of a process whose output asyncio reads is noticed only when its children end too.
        ours, its = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=its,
                stderr=its,
                env=command.environ,
                start_new_session=True,  # so that its own children end with it
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        except OSError as error:
            os.close(ours)
            await owned.aclose()
            program = command.argv[0]
            raise EngineError(
                f"{command.name} cannot be started with {program!r}: {error}; set rollout.python"
            ) from None
        finally:
            os.close(its)
        output = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb"))
        return cls(command.name, process, output, owned)

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

    @property
    def cpu_seconds(self) -> float:
        """What it and all that it has started have used of the processors; 0 where the kernel does not tell."""
        tree = [self.pid]
        for pid in tree:
            tree += children_of(pid)
        return sum(map(_cpu_seconds, tree))

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


def _cpu_seconds(pid: int) -> float:
    """Of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime
