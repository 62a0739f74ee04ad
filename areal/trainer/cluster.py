"""The processes of a run as synchronous code sees them: an event loop in a thread of its own, and what runs there.

Invariant: when a death ends the run, every waiting call raises what died, not the broken connection that it caused.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from areal.api.errors import ArealError, EngineError
from areal.config.training import SchedulerConfig
from areal.infra.loop_thread import LoopThread
from areal.infra.rpc.channel import ChannelClosed, RemoteError
from areal.infra.rpc.shipping import Shipper
from areal.infra.scheduler import Ask
from areal.trainer.processes import CAUSE_SECONDS, OnEvent, Processes
from areal.utils.closing import Closing

T = TypeVar("T")


class Cluster(Closing):
    def __init__(
        self,
        config: SchedulerConfig,
        logs: Path,
        shipped: Iterable[Path],
        on_event: OnEvent = lambda kind, detail: None,
    ) -> None:
        """`shipped`: directories of models and tokenizers, which processes on other hosts may fetch.

        `on_event` as in `Processes`.
        """
        self._loop = LoopThread()
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        self._on_failure: list[Callable[[Exception], None]] = []
        self.shipper = Shipper(shipped)
        self.processes = Processes(config, logs, self.fail, self.shipper.handlers, on_event)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop.loop

    @property
    def thread_id(self) -> int:
        """Of the thread of the event loop."""
        return self._loop.thread_id

    def reserve(self, asks: Sequence[Ask]) -> None:
        """Places for all processes of the run, or for none."""
        self.wait(self.processes.reserve(asks))

    def wait(self, work: Coroutine[Any, Any, T], cause_seconds: float = CAUSE_SECONDS) -> T:
        """Run `work` on the event loop and wait for it here; an error waits for its cause to be known."""
        try:
            return self._loop.run(work)
        except TimeoutError as error:
            raise self._loop.run(self._cause(EngineError(str(error)), cause_seconds)) from error
        except (ArealError, ExceptionGroup) as error:
            raise self._loop.run(self._cause(error, cause_seconds)) from error

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the event loop, without waiting."""
        return self._loop.begin(work)

    def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for what must be done at the end, also of a run that has failed."""
        return self._loop.run(work)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call `function` on the event loop, without waiting; safe in a signal handler."""
        self._loop.call(function)

    def fail(self, error: Exception) -> None:
        """Make every waiting call raise this error. Call it on the event loop."""
        self._failure = self._failure or error
        self._failed.set()
        for told in self._on_failure:
            told(self._failure)

    def when_failed(self, told: Callable[[Exception], None]) -> None:
        """Call `told` on the event loop with what ended the run; at once if it has."""
        self._on_failure.append(told)
        if self._failure is not None:
            told(self._failure)

    def close(self) -> None:
        self._loop.run(self.processes.close())
        self._loop.close()

    async def _cause(self, error: Exception, seconds: float) -> Exception:
        """What `error` follows from: a process that died, or Ctrl-C, if it was one of them."""
        if isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, (ChannelClosed, EngineError, RemoteError)):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), seconds)
        return self._failure or error
