"""Calls of one function that were sent to one worker process together, and run there one after the other.

Invariant: every call is settled, returned as failed, or given back, exactly once; none that began is given back. A call
that hangs or ends the process costs the others a moment: what has finished is settled as it arrives, and what has not
begun is taken from the process and given back.
"""

import signal
import time
from collections.abc import Callable

from areal.utils.process_call import Call
from areal.utils.process_channel import EXHAUSTED_STATUS, ChannelClosed
from areal.utils.process_child import Child
from areal.utils.process_errors import CallCrashed, CallError, CallExhausted, CallFailed, CallTimeout, LoadFailed

_PATIENCE_SECONDS = 0.05
"""How long one call may take before those behind it are given to another process."""

Failed = list[tuple[Call, CallError]]


class NotStarted(Exception):
    """The process ended, or took too long, before the first call began."""

    def __init__(self, failure: CallError) -> None:
        super().__init__(str(failure))
        self.failure = failure
        """What that means for a call that was sent alone."""


class Batch:
    def __init__(self, child: Child, calls: list[Call], give_back: Callable[[list[Call]], None]) -> None:
        self._child = child
        self._calls = calls
        self._give_back = give_back
        self._replies = 0
        self._end = len(calls)
        """Calls from here on were given back."""
        self._certain = len(calls) == 1
        """Whether all calls before `_end` are known to have begun."""
        self._started = self._began = 0.0
        """When the first call began, and when the one did that runs now."""

    @property
    def seconds_per_call(self) -> float | None:
        """Of the calls that came to an end; None if none did."""
        return (self._began - self._started) / self._replies if self._replies else None

    def run(self, load_seconds: float) -> Failed:
        """Settle the calls that return or raise. Returns those that ended otherwise, for the caller to settle."""
        if self._certain:
            self._calls[0].enter(self._child)
        try:
            self._begin(load_seconds)
            return self._finish()
        except LoadFailed as error:
            return [(call, error) for call in self._calls]
        except NotStarted:
            raise
        except Exception as error:  # whatever a process that lost its mind can answer: nobody may wait for ever
            self._child.usable = False
            self._take_back()
            failure = CallCrashed(f"{self._calls[0].function.name} left its process without sense: {error!r}")
            return [(call, failure) for call in self._calls[self._replies : self._end]]
        finally:
            self._calls[self._end - 1].leave()

    def _begin(self, load_seconds: float) -> None:
        function = self._calls[0].function
        deadline = time.monotonic() + load_seconds
        try:
            self._child.begin(function, [call.body for call in self._calls], deadline)
        except ChannelClosed:
            raise NotStarted(how_it_ended(self._child, f"loading {function.name}")) from None
        except TimeoutError:
            self._child.usable = False
            text = f"{function.name} and its arguments took over {load_seconds:g} s to load"
            raise NotStarted(CallTimeout(text)) from None

    def _finish(self) -> Failed:
        self._started = self._began = time.monotonic()
        while self._replies < self._end:
            call = self._calls[self._replies]
            try:
                self._settle_next(call)
            except TimeoutError:
                self._child.usable = False
                return [(call, CallTimeout(f"{call.function.name} was killed after {call.timeout_seconds:g} s"))]
            except ChannelClosed:
                self._take_back()
                failure = how_it_ended(self._child, call.function.name)
                # If it died between two calls, it was none's doing.
                return [(call, failure)] if self._replies < self._end else []
        return []

    def _settle_next(self, call: Call) -> None:
        deadline = self._began + call.timeout_seconds
        if self._replies == self._end - 1:
            self._certain = True
            call.enter(self._child)
        if not self._certain:
            try:
                return self._settle(call, min(deadline, self._began + _PATIENCE_SECONDS))
            except TimeoutError:
                return self._take_back()
        return self._settle(call, deadline)

    def _settle(self, call: Call, deadline: float) -> None:
        try:
            result, failure = self._child.reply(call.function, deadline), None
        except CallFailed as error:
            result, failure = None, error
        self._replies += 1
        self._began = time.monotonic()
        call.leave()
        call.settle(result, failure)

    def _take_back(self) -> None:
        self._certain = True
        if count := self._child.take_back():
            self._end -= count
            self._give_back(self._calls[self._end :])


def how_it_ended(child: Child, what: str) -> CallCrashed:
    status = child.end()
    if status == EXHAUSTED_STATUS:
        return CallExhausted(f"{what} needs more memory than its process may have")
    if status is None:
        return CallCrashed(f"{what} left process {child.pid}, which does not end when killed")
    # Real-time signals have no names.
    names = {known.value: known.name for known in signal.Signals}
    how = f"exit status {status}" if status >= 0 else f"killed by {names.get(-status, f'signal {-status}')}"
    return CallCrashed(f"{what} ended its process: {how}")
