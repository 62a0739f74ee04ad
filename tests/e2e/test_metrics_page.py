"""/metrics of real runs: scraped while they train, while a process of theirs dies, after the driver was killed."""

import itertools
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_runs import START_SECONDS, Run, Start, rows_of, summary_of

SCRAPES = 50


def url_of(run: Run) -> str:
    return run.wait_for("metrics for Prometheus at http").rpartition(" ")[2]


def scrape(url: str) -> dict[str, float]:
    """Every series as Prometheus writes it, `name{label="value"}`."""
    families = text_string_to_metric_families(httpx.get(url, timeout=60, trust_env=False).text)
    return {
        sample.name + "".join(f"{{{name}={value}}}" for name, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.timeout(600)
def test_a_run_that_is_scraped_all_the_time_trains_as_it_should(example: Start, run_dir: Path) -> None:
    steps = 240  # enough to train while the worker is started again
    run = example(f"total_train_steps={steps}", "metrics.port=0", "evaluator.freq_steps=80", "saver.freq_steps=40")
    address = httpx.URL(url := url_of(run))
    deaf = socket.create_connection((address.host, address.port))
    deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
    run.wait_for(rf"^step [1-9]\d*/{steps} ")
    pages = [scrape(url) for _ in range(SCRAPES)]
    os.kill(run.only("areal.rollout.worker"), signal.SIGKILL)
    run.wait_for("it is started again")
    deadline = time.monotonic() + START_SECONDS
    while pages[-1]["areal_process_restarts_total{role=rollout worker}"] == 0 and time.monotonic() < deadline:
        pages.append(scrape(url))  # processes are asked once a second
    assert run.wait() == 0, run.text
    deaf.close()
    assert len(rows_of(run_dir / "rollouts.jsonl")) == steps * 16
    assert summary_of(run_dir)["steps"] == steps
    for before, after in itertools.pairwise(pages):
        totals = [series for series in before if series.partition("{")[0].endswith("_total")]
        assert [series for series in totals if after[series] < before[series]] == []
    last = pages[-1]
    assert last["areal_engines{state=serving}"] == 1
    assert last["areal_target_steps"] == steps
    assert last["areal_trained_episodes_total"] == 16 * last["areal_steps_total"]
    assert last["areal_sampled_tokens_total"] >= last["areal_trained_tokens_total"] > 0
    assert last["areal_process_deaths_total{role=rollout worker}"] == 1
    assert last["areal_process_restarts_total{role=rollout worker}"] == 1
    assert last["areal_cpu_seconds_total{process=engine}"] > 0
    assert last["areal_held_out_reward{decoding=sampled}"] >= 0


@pytest.mark.timeout(600)
def test_counters_go_on_after_the_driver_was_killed(example: Start) -> None:
    settings = ("total_train_steps=40", "metrics.port=0", "saver.freq_steps=5", "trial_name=killed")
    run = example(*settings)
    url = url_of(run)
    run.wait_for(r"^step 1\d/40 ")
    seen = scrape(url)
    run.kill(signal.SIGKILL)
    run.wait()
    again = example(*settings)
    resumed = scrape(url_of(again))
    totals = {series: value for series, value in seen.items() if series.partition("{")[0].endswith("_total")}
    assert totals["areal_steps_total"] >= 10
    assert {series: resumed[series] for series, value in totals.items() if resumed[series] < value} == {}
