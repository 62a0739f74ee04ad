"""Rejected episodes, counted by reason; the first of each reason are shown with their traceback."""

from collections import Counter
from dataclasses import dataclass, field

from areal.api.messages import Rejection
from areal.api.rejection import RejectReason
from areal.utils import logging

TRACES_SHOWN = 2
"""Rejections logged in full per reason; the rest are only counted."""

logger = logging.getLogger("rollout")


@dataclass
class Tally:
    counts: Counter[RejectReason] = field(default_factory=Counter)
    idle: Counter[RejectReason] = field(default_factory=Counter)
    """Since an episode was last accepted."""
    latest: Rejection | None = None
    where: str = ""
    """What the log calls these episodes; empty = those of training."""

    def add(self, rejection: Rejection) -> None:
        self.counts[rejection.reason] += 1
        self.idle[rejection.reason] += 1
        self.latest = rejection
        # Age is no fault that a user could find in a log.
        if self.counts[rejection.reason] <= TRACES_SHOWN and rejection.reason is not RejectReason.STALE:
            text = f"{rejection.detail}\n{rejection.trace}".rstrip()
            logger.warning("%srejected (%s): %s", f"{self.where} " if self.where else "", rejection.reason, text)

    def accepted(self) -> None:
        self.idle.clear()

    def why_nothing(self) -> str:
        """The cause in one sentence, for a run that stops because nothing is accepted."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.idle.most_common())
        latest = self.latest.detail if self.latest else "none"
        return (
            f"the last {self.idle.total()} episodes were all rejected ({reasons}), so nothing can be trained; "
            f"the latest: {latest}"
        )
