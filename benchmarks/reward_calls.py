"""The reward functions that `benchmarks.reward_pool` calls, in a light module because every worker imports it."""

import os
import time
from typing import Any

BUSY_SECONDS = 0.005


def small(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Microseconds: compares an answer."""
    return float(completion.strip() == data["answer"])


def busy(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Five milliseconds of processor time."""
    end = time.process_time() + BUSY_SECONDS
    while time.process_time() < end:
        sum(range(500))
    return small(prompt, completion, prompt_ids, completion_ids, **data)


def survive(kind: str, number: int) -> int:
    """The square of `number`, unless `kind` is a way of not returning."""
    if kind == "loop":
        while True:
            pass
    if kind == "crash":
        os.abort()
    if kind == "hoard":
        hoard: list[bytes] = []
        while True:
            hoard.append(b"x" * (1 << 20))
    return number * number
