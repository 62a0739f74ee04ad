"""How a call in a worker process can end other than with its result.

CallError
├── CallTimeout        it ran past its deadline and its process was killed
├── CallCrashed        its process ended under it
│   └── CallExhausted  it needed more memory than its process may have
├── CallFailed         it raised; carries the exception as text, because a remote one may not exist here
│   └── LoadFailed     it never began: its module or its arguments cannot be loaded in a worker process
└── PoolClosed         the pool was closed before it finished
"""

from typing import Self


class CallError(Exception):
    """A call to a worker process has no result."""


class CallTimeout(CallError):
    """The call ran past its deadline and its process was killed."""


class CallCrashed(CallError):
    """The call's process ended under it."""


class CallExhausted(CallCrashed):
    """The call needed more memory than its process may have, so that was ended."""


class PoolClosed(CallError):
    """The pool was closed before the call finished."""


class CallFailed(CallError):
    """The function raised, or it, its arguments or its result cannot travel between processes."""

    _VERB = "raised"

    def __init__(self, function: str, kind: str, text: str, trace: str = "") -> None:
        super().__init__(f"{function} {self._VERB} {kind}: {text}")
        self.function = function
        self.kind = kind
        """Name of the exception's type."""
        self.text = text
        """The exception's own message."""
        self.trace = trace
        """The traceback as the worker process saw it."""
        if trace:
            self.add_note(f"In the worker process:\n{trace.rstrip()}")

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str, str]]:
        return type(self), (self.function, self.kind, self.text, self.trace)


class LoadFailed(CallFailed):
    """The function's module, or its arguments, raised while a worker process loaded them; the call never began."""

    _VERB = "could not be loaded in a worker process:"
