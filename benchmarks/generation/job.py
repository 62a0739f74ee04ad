"""The requests that every generator gets, and how they are timed. Runs in environments without areal and torch.

A generator is a script: a job as JSON on standard input, tokens per second as a line of JSON on standard output.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], int]
"""(prompts, new tokens of each) -> tokens generated; returns when all are done."""


def read_job() -> dict[str, Any]:
    job: dict[str, Any] = json.load(sys.stdin)
    return job


def measure(job: dict[str, Any], generate: Generate) -> None:
    """Time each case of the job and print the rates; the best of a case's repeats counts."""
    generate(prompts(job["vocab"], 2, 16, seed="first"), 4)
    rates: dict[str, dict[str, float]] = {}
    for case in job["cases"]:
        best = {"per_second": 0.0, "per_cpu_second": 0.0}
        for repeat in range(case["repeats"]):
            asked = prompts(
                job["vocab"], case["concurrency"], case["prompt"], seed=f"{case['name']} {repeat}", alike=case["alike"]
            )
            started, worked = time.perf_counter(), time.process_time()
            came = generate(asked, case["new"])
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
            expected = case["concurrency"] * case["new"]
            if came != expected:
                raise RuntimeError(f"{expected} tokens must be generated, got {came}")
            found = {"per_second": came / seconds, "per_cpu_second": came / max(cpu_seconds, 1e-6)}
            best = {name: max(best[name], rate) for name, rate in found.items()}
        rates[case["name"]] = best
        print(f"  {case['name']}: {best['per_second']:.1f} tokens/s", file=sys.stderr)
    print(json.dumps(rates))


def prompts(vocab: int, count: int, length: int, *, seed: str, alike: bool = False) -> list[list[int]]:
    """Random token ids, different for every seed; `alike` makes all prompts equal."""
    draw = random.Random(seed)
    each = [[draw.randrange(3, vocab) for _ in range(length)] for _ in range(1 if alike else count)]
    return each * count if alike else each
