"""What runs in worker processes during tests of the pool; a module of its own, because each of them imports it."""

import os
import select
import signal
from typing import Any

PAUSES = {"brief": 0.004, "slow": 0.07}
"""Seconds, below and above the time after which calls that were sent together are given to another process."""


def act(kind: str, value: int, note: str = "") -> int:
    if note:
        with open(note, "a") as file:
            file.write(f"{value}\n")
    if kind == "hang":
        signal.pause()
    if kind == "crash":
        os._exit(3)
    if kind == "raise":
        raise ValueError(value)
    if kind in PAUSES:
        select.select([], [], [], PAUSES[kind])
    return value * 2


class Explosive:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return act, (self.kind, 0)
