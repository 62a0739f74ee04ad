"""The order in which a run sees its tasks: fixed by the seed, endless, each with a number, and resumable exactly."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Settled:
    """Tasks that need not be run again (trained or rejected): all below `below`, and those in `beyond`."""

    below: int = 0
    beyond: set[int] = field(default_factory=set)

    def add(self, task_id: int) -> None:
        self.beyond.add(task_id)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1

    def __contains__(self, task_id: int) -> bool:
        return task_id < self.below or task_id in self.beyond


def task_stream(
    tasks: Sequence[dict[str, Any]], seed: int, settled: Settled, *, shuffle: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, task) for every task that is not settled yet, epoch after epoch, each shuffled differently."""
    epoch = settled.below // len(tasks)
    done = Settled(settled.below, set(settled.beyond))  # a copy: what is settled later has already been yielded
    while True:
        order = list(range(len(tasks)))
        if shuffle:
            random.Random(f"{seed}-{epoch}").shuffle(order)
        for place, index in enumerate(order, start=epoch * len(tasks)):
            if place not in done:
                yield place, tasks[index]
        epoch += 1
