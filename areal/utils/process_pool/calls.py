"""One call on its way to a worker process: the packed function, its packed arguments, and its failures.

CallError
├── CallTimeout        it ran past its deadline and its process was killed
├── CallCrashed        its process ended during the call
│   └── CallExhausted  it needed more memory than its process may use
├── CallFailed         it raised; carries the exception as text, because the class may not exist in this process
│   ├── LoadFailed     it never began: it or its arguments cannot be sent to a worker process or loaded there
│   └── ResultRefused  it returned what is no data
└── PoolClosed         the pool was closed before it finished
"""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, Self

import cloudpickle

from areal.utils.callables import name_of
from areal.utils.process_pool.channel import DIGEST_BYTES


class CallError(Exception):
    """A call to a worker process has no result."""


class CallTimeout(CallError):
    """The call ran past its deadline and its process was killed."""


class CallCrashed(CallError):
    """The call's process ended during the call."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        """How the process ended, as `subprocess` has it; None = not known, or not by itself."""


class CallExhausted(CallCrashed):
    """The call needed more memory than its process may use, so the process was ended."""


class PoolClosed(CallError):
    """The pool was closed before the call finished."""


class CallFailed(CallError):
    """The function raised."""

    _VERB = "raised"

    def __init__(self, function: str, kind: str, text: str, trace: str = "") -> None:
        super().__init__(f"{function} {self._VERB} {kind}: {text}")
        self.function = function
        self.kind = kind
        """Name of the exception's type."""
        self.text = text
        """The exception's own message."""
        self.trace = trace
        """The traceback in the worker process."""
        if trace:
            self.add_note(f"In the worker process:\n{trace.rstrip()}")

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str, str]]:
        return type(self), (self.function, self.kind, self.text, self.trace)


class LoadFailed(CallFailed):
    """The function or its arguments cannot be pickled, or raised while a process loaded them; the call never began."""

    _VERB = "could not be loaded in a worker process:"


class ResultRefused(CallFailed):
    """The function returned what is no data, or more of it than may be sent. Results are not pickled."""

    _VERB = "returned no result that can be sent:"


@dataclass(frozen=True)
class PackedFunction:
    """A function in bytes. Pack once and submit often: a worker process unpacks each digest once."""

    name: str
    payload: bytes
    digest: bytes

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "PackedFunction":
        name = name_of(function)
        payload = _pack(function, name, "itself")
        return cls(name, payload, hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest())

    def pack_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        return _pack((tuple(args), dict(kwargs)), self.name, "its arguments")


class Killable(Protocol):
    def kill(self) -> None: ...


class PoolCall(Future[Any]):
    """A call, and the future of its result, which can be cancelled until it is settled, even while the function runs.

    One object, because two that know each other would be left to the garbage collector, call by call.
    """

    def __init__(self, function: PackedFunction, arguments: bytes, timeout_seconds: float) -> None:
        super().__init__()
        self.function = function
        self.arguments = arguments
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._process: Killable | None = None

    def cancel(self) -> bool:
        # Never marked as running before it is settled, since a running Future cannot be cancelled.
        cancelled = super().cancel()
        if cancelled:
            with self._lock:
                if self._process is not None:
                    self._process.kill()
        return cancelled

    def kill_on_cancel(self, process: Killable | None) -> None:
        """From now on, cancelling it kills `process`; None = it kills nothing."""
        with self._lock:
            self._process = process
            if process is not None and self.cancelled():
                process.kill()

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Complete it, unless it was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)


def _pack(value: Any, name: str, what: str) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:  # whatever a user's __reduce__ raises
        text = f"{what} cannot be sent to a worker process ({error}); pass plain data"
        raise LoadFailed(name, type(error).__name__, text) from error
    return packed
