"""The order in which a run sees its tasks: fixed by the seed, endless, each with a number, and resumable exactly."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson


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


def digest_of_tasks(tasks: Sequence[dict[str, Any]]) -> str:
    """The same for the same tasks in the same order, in every process; objects of unknown types go by their type."""
    digest = hashlib.blake2b(digest_size=8)
    for task in tasks:
        digest.update(_content(task))
        digest.update(b"\n")
    return digest.hexdigest()


def _content(task: dict[str, Any]) -> bytes:
    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    try:
        return orjson.dumps(task, default=_plain, option=options)
    except TypeError:  # a number beyond 64 bits, a broken surrogate, a key that is not a plain value
        in_order = dict(sorted(task.items(), key=lambda item: str(item[0])))
        return json.dumps(in_order, default=_plain, skipkeys=True).encode()


def _plain(value: Any) -> Any:
    """A stand-in for a value JSON cannot express: a hash of its bytes, a set's items, else its type's name."""
    name = type(value).__qualname__
    if isinstance(value, bytes | bytearray | memoryview):
        return [name, hashlib.blake2b(value, digest_size=8).hexdigest()]
    if isinstance(value, set | frozenset):
        return [name, sorted(map(str, value))]
    if callable(getattr(value, "tobytes", None)):
        return [name, hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()]
    return name
