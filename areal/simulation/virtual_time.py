"""An event loop whose clock jumps to the next thing that happens instead of waiting for it.

Code that runs on it is unchanged: timers, time-outs and `asyncio.sleep` mean virtual seconds. It refuses to wait for
the outside world: when nothing is scheduled any more, nothing can happen, and that is an error.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Never sleeps; the time it was asked to sleep has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("the simulation waits for something that will never happen")
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, from virtual second 0 on."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
