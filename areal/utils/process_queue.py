"""Calls that wait for a process, and how many of them are worth sending together.

Quick calls of one function travel together, as many as take about ten milliseconds; a call that takes longer, or whose
pace is not known yet, travels alone. Nothing is kept back to fill a batch, and no process gets more than its share of
what is queued. Not for several threads at once.
"""

from collections import deque

from areal.utils.process_call import Call

_BATCH_SECONDS = 0.01
_BATCH_CALLS = 64
_BATCH_BYTES = 1 << 18
_MAX_PACES = 1024
_NEWEST_WEIGHT = 0.5


class CallQueue:
    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._calls: deque[Call] = deque()
        self._paces: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def append(self, call: Call) -> None:
        self._calls.append(call)

    def put_back(self, calls: list[Call]) -> None:
        self._calls.extendleft(reversed(calls))

    def clear(self) -> list[Call]:
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def note_pace(self, call: Call, seconds: float) -> None:
        digest = call.function.digest
        if len(self._paces) >= _MAX_PACES:
            self._paces.clear()
        before = self._paces.get(digest, seconds)
        self._paces[digest] = before + _NEWEST_WEIGHT * (seconds - before)

    def cut(self) -> list[Call]:
        """The calls for one process, from the front; those cancelled meanwhile are dropped."""
        batch: list[Call] = []
        room, room_bytes = 1, _BATCH_BYTES
        while self._calls and len(batch) < room:
            call = self._calls[0]
            if batch and not (_alike(call, batch[0]) and len(call.body) <= room_bytes):
                break
            self._calls.popleft()
            if call.future.cancelled():
                call.settle()
                continue
            if not batch:
                room = self._room(call)
            batch.append(call)
            room_bytes -= len(call.body)
        return batch

    def _room(self, call: Call) -> int:
        pace = self._paces.get(call.function.digest)
        if pace is None or call.alone:
            return 1
        share = -(-(len(self._calls) + 1) // self._processes)
        return max(1, min(_BATCH_CALLS, share, int(_BATCH_SECONDS / max(pace, 1e-9))))


def _alike(call: Call, other: Call) -> bool:
    return not call.alone and call.function.digest == other.function.digest
