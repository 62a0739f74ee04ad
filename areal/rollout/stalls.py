"""What a worker tells of episodes that block its event loop: at once in its log, and with its next group to the driver.

The log is the only place that can be reached while the loop is blocked.
"""

from collections import deque

from areal.api.messages import Stall
from areal.infra.stall_book import StallBook, over, so_far
from areal.infra.stall_watch import StallWatch
from areal.rollout.user_code import call
from areal.utils.logging import getLogger

logger = getLogger("rollout")


class WorkerStalls:
    def __init__(self, seconds: float, limit_seconds: float | None = None) -> None:
        """Watches the event loop of the calling thread; `seconds` is `rollout.stall_seconds`.

        Code that blocks it for `limit_seconds`, an episode's whole time, fails its episode.
        """
        self._book = StallBook()
        self._told = False
        self._ended: deque[Stall] = deque()
        self._watch = StallWatch(seconds, self._begin, self._end, limit_seconds=limit_seconds, entries=(call.__code__,))
        self._watch.start()

    def take(self) -> list[Stall]:
        """Those that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        self._watch.close()

    def _begin(self, stall: Stall) -> None:
        self._told = self._book.is_news(stall)
        if self._told:
            logger.warning("%s", so_far(stall))

    def _end(self, stall: Stall) -> None:
        self._book.add(stall)
        self._ended.append(stall)
        if self._told:
            logger.warning("%s", over(stall))
