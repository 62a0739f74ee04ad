"""When groups start under `when_stale: wait`: at every version, or in larger waves every few versions. Pure estimates.

A batch waits for the last group of its version, and the more versions have groups of their own, the more often. A wave
of p batches every p versions has fewer last ones to wait for, but leaves fewer groups in flight before the next wave.
Where durations vary much, waves are faster; where they hardly do, a start at every version is. So both are estimated
from the durations that were seen, and the shorter step is chosen.

For waves of p batches, with η versions of staleness, D(n) the longest of n groups from its first call of the model to
its end, and t the time to train a batch, a step takes at least
- t, and the time in which `max_running` groups finish a batch;
- (D(p · batch) + t · (L - η)) / L, with L the versions, a multiple of p and more than η, from the start of a wave to
  that of the first one that begins after all of it was trained;
- (Q + t) / p, with Q the time until enough of a wave have ended for the batches that are taken before the next begins.
"""

from collections import deque

import numpy as np

from areal.api.messages import Array

REMEMBERED_BATCHES = 32
"""Durations are taken from so many batches."""


class Waves:
    def __init__(self, batch_size: int, max_staleness: int, max_running: int) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._max_running = max_running
        self._durations = deque[float](maxlen=REMEMBERED_BATCHES * batch_size)
        self._aging = deque[float](maxlen=REMEMBERED_BATCHES * batch_size)
        """The part of each in which the group grew old."""
        self._train_seconds = 0.0

    def ended(self, seconds: float, aging_seconds: float) -> None:
        """A group took so long, and this much of it since it was known to have no token."""
        self._durations.append(seconds)
        self._aging.append(aging_seconds)

    def trained(self, seconds: float) -> None:
        """So much passed between a batch and the version that it led to."""
        self._train_seconds = seconds

    def batches(self) -> int:
        """Batches of a wave, and versions until the next; 1 = groups start at every version."""
        # More than η would leave nothing in flight when a wave begins. Until durations are known, nothing is changed.
        most = min(self._max_staleness, self._max_running // self._batch_size)
        if most < 2 or len(self._durations) < (self._max_staleness + 1) * self._batch_size:
            return 1
        durations, aging = np.sort(np.array(self._durations)), np.sort(np.array(self._aging))
        return min(range(1, most + 1), key=lambda batches: self._step_seconds(batches, durations, aging))

    def _step_seconds(self, batches: int, durations: Array, aging: Array) -> float:
        train, lag = self._train_seconds, self._max_staleness
        cycle = batches * -(-(lag + 1) // batches)
        slots = float(durations.mean()) * self._batch_size / self._max_running
        last = (_longest_of(batches * self._batch_size, aging) + train * (cycle - lag)) / cycle
        early = max(0, 2 * batches - lag - 1) / batches
        enough = (_quantile(durations, early) + train) / batches if early else 0.0
        return max(train, slots, last, enough)


def _quantile(durations: Array, share: float) -> float:
    """How long so many of them took at most, between two if need be; they are sorted."""
    place = share * (len(durations) - 1)
    before = int(place)
    shorter, longer = float(durations[before]), float(durations[min(before + 1, len(durations) - 1)])
    return shorter + (longer - shorter) * (place - before)


def _longest_of(count: int, durations: Array) -> float:
    """The expected longest of `count` draws from these, which are sorted."""
    below = np.linspace(0.0, 1.0, len(durations) + 1) ** count
    return float(durations @ np.diff(below))
