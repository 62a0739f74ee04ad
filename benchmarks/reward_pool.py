"""Reward calls in the killable pool: what they cost compared with a bare `ProcessPoolExecutor`, and what bad ones cost.

Both get the same calls from the same number of concurrent episodes, in turns, with one process per core. The executor
has no deadlines and breaks for good with the first process that dies, so survival has no peer but the same calls
without the bad ones.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from areal.api.reward_api import AsyncRewardWrapper, Limits, Value
from areal.utils.process_pool.pool import SHARED, usable_cores
from benchmarks.report import Aim, main
from benchmarks.reward_calls import BUSY_SECONDS, busy, score, small, survive

ARGS = ("<|im_start|>user\nSort 5291<|im_end|>\n<|im_start|>assistant\n", "1259", [*range(40)], [*range(12)])
DATA = {"answer": "1259", "messages": [{"role": "user", "content": "Sort 5291"}]}
SURVIVAL_LIMITS = Limits(memory_bytes=64 << 20)
SURVIVAL_SECONDS = 0.5
BAD = ("loop", "crash", "hoard")
OUTCOME = {"loop": "timeout", "crash": "crash", "hoard": "memory"}
UNDER_FIRE = ("raise", "loop", "crash")
UNDER_FIRE_SECONDS = 0.1
Call = Callable[[int], Awaitable[Any]]


async def drive(call: Call, calls: int, episodes: int) -> tuple[float, list[float], list[Any]]:
    """Seconds in all, seconds of each call, and results of `call(0) … call(calls - 1)`, `episodes` at a time."""
    latencies, results, numbers = [0.0] * calls, [None] * calls, iter(range(calls))

    async def episode() -> None:
        for number in numbers:
            began = time.perf_counter()
            results[number] = await call(number)
            latencies[number] = time.perf_counter() - began

    began = time.perf_counter()
    await asyncio.gather(*(episode() for _ in range(episodes)))
    return time.perf_counter() - began, latencies, results


async def compare(function: Callable[..., float], calls: int, episodes: int, rounds: int) -> dict[str, Any]:
    """`rounds` of `calls` calls through each, ours and the executor's in turns; figures are medians over rounds."""
    loop = asyncio.get_running_loop()
    reward = AsyncRewardWrapper(function)
    rows: dict[str, list[dict[str, float]]] = {"ours": [], "executor": []}
    with ProcessPoolExecutor(usable_cores()) as executor:
        ways: dict[str, Call] = {
            "executor": lambda _: loop.run_in_executor(executor, partial(function, *ARGS, **DATA)),
            "ours": lambda _: reward(*ARGS, **DATA),
        }
        for way in ways.values():
            await drive(way, 2 * episodes, episodes)  # all processes started, everything imported
        for _ in range(rounds):
            for name, way in ways.items():
                before = time.process_time()
                seconds, latencies, results = await drive(way, calls, episodes)
                assert results == [1.0] * calls
                rows[name].append(_row(seconds, time.process_time() - before, latencies))
    medians = {name: _medians(found) for name, found in rows.items()}
    ratio = [a["calls_per_s"] / b["calls_per_s"] for a, b in zip(rows["ours"], rows["executor"], strict=True)]
    tails = [a["p99_ms"] / b["p99_ms"] for a, b in zip(rows["ours"], rows["executor"], strict=True)]
    return medians | {"calls_per_s_ratio": statistics.median(ratio), "p99_ratio": statistics.median(tails)}


def _row(seconds: float, cpu_seconds: float, latencies: list[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    return {
        "calls_per_s": len(ordered) / seconds,
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
        "caller_cpu_us_per_call": cpu_seconds / len(ordered) * 1e6,
    }


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


async def survival(calls: int, episodes: int, every: int) -> dict[str, Any]:
    """One call of each bad kind among every `every` calls, against the same calls all good."""
    good = await _survive(calls, episodes, lambda _: "good")
    kinds = dict.fromkeys(range(calls), "good")
    for offset, kind in enumerate(BAD, 1):
        kinds |= dict.fromkeys(range(every * offset // (len(BAD) + 1), calls, every), kind)
    mixed = await _survive(calls, episodes, kinds.__getitem__)
    wanted = {kind: sum(found == kind for found in kinds.values()) for kind in BAD}
    bad = sum(wanted.values())
    return {
        "calls": calls,
        "bad_calls": wanted,
        "all_good": good,
        "with_bad": mixed,
        "throughput_lost": 1 - good["seconds"] / mixed["seconds"],
        "seconds_per_bad_call": (mixed["seconds"] - good["seconds"]) / bad,
        "seconds_until_deadlines": wanted["loop"] * SURVIVAL_SECONDS / usable_cores(),
        "bad_of_expected_outcome": sum(min(wanted[k], mixed["outcomes"].get(OUTCOME[k], 0)) for k in BAD) / bad,
    }


async def under_fire(function: Callable[[str, int], int], calls: int, episodes: int, rounds: int) -> dict[str, Any]:
    """3 % bad calls, a third each that raise, hang and crash, in turns with the same calls all good.

    A call that hangs has its process until its deadline, whatever the pool does: deadlines over processes are seconds
    that are subtracted before throughputs are compared. What it takes to notice, kill and replace a process is not.
    """
    kinds = ["good"] * calls
    for offset, kind in enumerate(UNDER_FIRE):
        kinds[17 + 33 * offset :: 100] = [kind] * len(kinds[17 + 33 * offset :: 100])
    await _survive(2 * episodes, episodes, lambda _: "good", function, UNDER_FIRE_SECONDS)  # all processes started
    deadlines = kinds.count("loop") * UNDER_FIRE_SECONDS / usable_cores()
    rows = []
    for _ in range(rounds):
        good = await _survive(calls, episodes, lambda _: "good", function, UNDER_FIRE_SECONDS)
        mixed = await _survive(calls, episodes, kinds.__getitem__, function, UNDER_FIRE_SECONDS)
        wrong = good["good_calls_wrong"] + mixed["good_calls_wrong"]
        rows.append({"good_seconds": good["seconds"], "mixed_seconds": mixed["seconds"], "good_calls_wrong": wrong})
    kept = [row["good_seconds"] / (row["mixed_seconds"] - deadlines) for row in rows]
    return {
        "calls": calls,
        "bad_calls": {kind: kinds.count(kind) for kind in UNDER_FIRE},
        "seconds_until_deadlines": deadlines,
        "rounds": rows,
        "throughput_kept": statistics.median(kept),
        "ms_per_replaced_process": statistics.median(
            (row["mixed_seconds"] - deadlines - row["good_seconds"])
            / (kinds.count("loop") + kinds.count("crash"))
            * 1e3
            for row in rows
        ),
    }


async def _survive(
    calls: int,
    episodes: int,
    kind_of: Callable[[int], str],
    function: Callable[[str, int], int] = survive,
    deadline_seconds: float = SURVIVAL_SECONDS,
) -> dict[str, Any]:
    reward = AsyncRewardWrapper(function, deadline_seconds, on_failure=Value(None), limits=SURVIVAL_LIMITS)
    seconds, _, results = await drive(lambda number: reward(kind_of(number), number), calls, episodes)
    wrong = sum(results[number] != number * number for number in range(calls) if kind_of(number) == "good")
    return {
        "seconds": seconds,
        "calls_per_s": calls / seconds,
        "good_calls_wrong": wrong,
        "outcomes": dict(reward.counts),
        "processes_at_end": len(SHARED.get(None, SURVIVAL_LIMITS).pids()),
    }


def construction_ms(count: int = 1000) -> float:
    began = time.perf_counter()
    for _ in range(count):
        AsyncRewardWrapper(small)
    return (time.perf_counter() - began) / count * 1e3


def run() -> tuple[dict[str, Any], list[Aim]]:
    figures: dict[str, Any] = {"processes": usable_cores(), "load_average": os.getloadavg()[0]}
    figures["construction_ms"] = construction_ms()
    figures["small"] = asyncio.run(compare(small, calls=4000, episodes=256, rounds=15))
    figures[f"busy_{BUSY_SECONDS * 1e3:.0f}_ms"] = slow = asyncio.run(compare(busy, calls=160, episodes=64, rounds=15))
    print("compared; now 3 % bad calls", file=sys.stderr)
    figures["under_fire"] = {
        "calls of 1 ms": (fire := asyncio.run(under_fire(score, calls=3000, episodes=256, rounds=5))),
        "calls of microseconds": (fire_of_small := asyncio.run(under_fire(survive, 5000, episodes=256, rounds=3))),
    }
    print("compared; now 10,000 calls with and without bad ones", file=sys.stderr)
    figures["survival"] = lived = asyncio.run(survival(calls=10_000, episodes=256, every=100))
    quick, ended = figures["small"], lived["with_bad"]
    aims = [
        Aim.at_most("milliseconds to make a wrapper", figures["construction_ms"], 1.0),
        Aim.at_least("small calls per second over the executor's", quick["calls_per_s_ratio"], 1.0),
        Aim.at_most("p99 of small calls over the executor's", quick["p99_ratio"], 1.0),
        Aim.at_least("5 ms calls per second over the executor's", slow["calls_per_s_ratio"], 0.95),
        Aim.at_least("throughput of 1 ms calls with 3 % bad ones, deadlines subtracted", fire["throughput_kept"], 0.7),
        Aim.at_least("the same of calls of microseconds", fire_of_small["throughput_kept"], 0.7),
        Aim.at_most("good calls answered wrongly among 300 bad ones", ended["good_calls_wrong"], 0),
        Aim.at_least("processes after 300 bad calls", ended["processes_at_end"], usable_cores()),
    ]
    return figures, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
