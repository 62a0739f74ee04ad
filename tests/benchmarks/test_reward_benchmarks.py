"""The benchmarks of rewards and HTTP clients run, in a size that proves nothing else."""

import asyncio
from pathlib import Path

from areal.utils.process_pool.pool import usable_cores
from benchmarks import http_clients, reward_pool
from benchmarks.reward_calls import small


def test_reward_pool_compares_the_same_calls_with_an_executor() -> None:
    found = asyncio.run(reward_pool.compare(small, calls=40, episodes=8, rounds=2))
    assert found["ours"]["calls_per_s"] > 0
    assert found["executor"]["p99_ms"] > 0
    assert found["calls_per_s_ratio"] > 0


def test_reward_pool_survives_bad_calls() -> None:
    found = asyncio.run(reward_pool.survival(calls=40, episodes=8, every=20))
    assert found["bad_calls"] == {"loop": 2, "crash": 2, "hoard": 2}
    assert found["with_bad"]["good_calls_wrong"] == 0
    assert found["with_bad"]["processes_at_end"] == usable_cores()
    assert sum(found["with_bad"]["outcomes"].values()) == 40


def test_http_clients_reports_what_the_guide_claims_and_what_is(tiny_math: Path) -> None:
    figures, aims = http_clients.run(count=3)
    assert figures["own"]["client_cpu_ms"] > figures["shared"]["client_cpu_ms"]
    assert figures["guide"]["claimed_ms_per_client"] == 50.0
    assert len(aims) == 2
