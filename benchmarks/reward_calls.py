"""The reward functions that `benchmarks.reward_pool` calls, in a light module because every worker imports it."""

import os
import time
from typing import Any

BUSY_SECONDS = 0.005
SCORE_SECONDS = 0.001


def small(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Microseconds: compares an answer."""
    return float(completion.strip() == data["answer"])


def busy(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Five milliseconds of processor time."""
    _compute(BUSY_SECONDS)
    return small(prompt, completion, prompt_ids, completion_ids, **data)


def survive(kind: str, number: int) -> int:
    """The square of `number`, unless `kind` is a way of not returning."""
    if kind == "loop":
        while True:
            pass
    if kind == "raise":
        raise ValueError(f"{number} is not scored")
    if kind == "crash":
        os.abort()
    if kind == "hoard":
        hoard: list[bytes] = []
        while True:
            hoard.append(b"x" * (1 << 20))
    return number * number


def score(kind: str, number: int) -> int:
    """The same after a millisecond of processor time, which is little for a reward that parses an answer."""
    if kind == "good":
        _compute(SCORE_SECONDS)
    return survive(kind, number)


def _compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(500))
