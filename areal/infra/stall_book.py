"""Stalls, counted by the line that caused them: the first of each line are told, the rest only counted."""

from collections import defaultdict
from dataclasses import dataclass, field

from areal.api.messages import Stall

TOLD = 3
"""Stalls of one line that are told one by one."""


@dataclass
class Blocked:
    times: int = 0
    seconds: float = 0.0
    remedy: str = ""


@dataclass
class StallBook:
    lines: dict[str, Blocked] = field(default_factory=lambda: defaultdict(Blocked))
    """By `file:line`."""

    def is_news(self, stall: Stall) -> bool:
        """Whether it is one of the first of its line, before it is added."""
        return stall.where not in self.lines or self.lines[stall.where].times < TOLD

    def add(self, stall: Stall) -> None:
        line = self.lines[stall.where]
        line.times += 1
        line.seconds += stall.seconds
        line.remedy = stall.remedy

    def summary(self) -> list[str]:
        """A sentence for each line, the worst first."""
        worst = sorted(self.lines.items(), key=lambda item: -item[1].seconds)
        return [
            f"{where} blocked the event loop {times(line.times)}, {line.seconds:.1f} s in all; use {line.remedy}"
            for where, line in worst
        ]


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def so_far(stall: Stall) -> str:
    """What is said while it lasts."""
    return (
        f"{episode(stall)} has been blocking the event loop for {stall.seconds:.1f} s {place(stall)}; all other "
        f"episodes of this worker wait; use {stall.remedy}"
    )


def over(stall: Stall) -> str:
    """What is said when it has ended."""
    return f"{episode(stall)} blocked the event loop for {stall.seconds:.1f} s {place(stall)}; use {stall.remedy}"


def episode(stall: Stall) -> str:
    task = "" if stall.task_id is None else f" (task {stall.task_id})"
    return f"{stall.workflow or 'code outside an episode'}{task}"


def place(stall: Stall) -> str:
    text = f": {stall.source}" if stall.source else ""
    return f"at {stall.where} in {stall.function}{text}"
