"""What every generator is asked, and how it is timed. Runs in environments that have neither areal nor torch.

A generator is a script: a job as JSON on standard input, tokens per second as JSON on the last line of standard output.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], int]
"""(prompts, new tokens of each) -> tokens that came out; returns when all are done."""


def read_job() -> dict[str, Any]:
    job: dict[str, Any] = json.load(sys.stdin)
    return job


def measure(job: dict[str, Any], generate: Generate) -> None:
    """Time each case of the job and print the result; `tokens` of a case are drawn, the best of its repeats counts."""
    generate(prompts(job["vocab"], 2, 16, seed=0), 4)
    rates: dict[str, float] = {}
    for case in job["cases"]:
        best = 0.0
        for repeat in range(case["repeats"]):
            asked = prompts(job["vocab"], case["concurrency"], case["prompt"], seed=repeat + 1, alike=case["alike"])
            started = time.perf_counter()
            came = generate(asked, case["new"])
            seconds = time.perf_counter() - started
            expected = case["concurrency"] * case["new"]
            if came != expected:
                raise RuntimeError(f"{came} tokens came out, {expected} were asked for")
            best = max(best, came / seconds)
        rates[case["name"]] = best
        print(f"  {case['name']}: {best:.1f} tokens/s", file=sys.stderr)
    print(json.dumps(rates))


def prompts(vocab: int, count: int, length: int, *, seed: int, alike: bool = False) -> list[list[int]]:
    """Random token ids, other ones for every seed; `alike` makes all prompts equal."""
    draw = random.Random(seed)
    each = [[draw.randrange(3, vocab) for _ in range(length)] for _ in range(1 if alike else count)]
    return each * count if alike else each
