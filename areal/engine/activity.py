"""When an engine was producing tokens, as stretches of time."""

from collections import deque

MERGE_GAP_SECONDS = 0.005
"""Steps closer than this count as one stretch."""
MAX_STRETCHES = 100_000
"""The oldest are forgotten beyond this."""


class Activity:
    def __init__(self) -> None:
        self._stretches: deque[tuple[float, float]] = deque(maxlen=MAX_STRETCHES)

    def note(self, start: float, end: float) -> None:
        if self._stretches and start - self._stretches[-1][1] < MERGE_GAP_SECONDS:
            start = self._stretches.pop()[0]
        self._stretches.append((start, end))

    def take(self) -> list[tuple[float, float]]:
        """Stretches (in the clock's seconds) since the last call."""
        stretches = list(self._stretches)
        self._stretches.clear()
        return stretches
