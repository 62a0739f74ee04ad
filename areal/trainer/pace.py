"""Tokens per second over the last few steps: one step alone is a burst or a pause."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_STEPS = 10


class Pace:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The first step is measured from now."""
        self._clock = clock
        self._marks = deque([(clock(), 0.0)], maxlen=WINDOW_STEPS + 1)
        """When each step ended, and the tokens of all steps up to it."""

    def step(self, tokens: float) -> float:
        """A step with so many tokens ends now; returns the rate."""
        self._marks.append((self._clock(), self._marks[-1][1] + tokens))
        (began, before), (now, total) = self._marks[0], self._marks[-1]
        return (total - before) / max(now - began, 1e-9)
