from pathlib import Path
from typing import Any

from areal.trainer import display
from areal.utils.threads import ThreadPlan

SUMMARY: dict[str, Any] = {
    "calls": 12345,
    "calls_per_second": 321.4,
    "overlap": 0.712,
    "cpu_seconds": {"driver": 30.2, "rollout worker 0": 11.0},
    "weight_pause_seconds": {"median": 0.0031, "max": 0.0124},
    "max_logprob_difference": 7.6e-06,
    "held_out": {"before_greedy": {"reward": 0.61, "tasks": 512}, "after_greedy": {"reward": 0.97, "tasks": 512}},
    "verdict": "held-out success 0.41 → 0.93 in 58 s",
}


def test_closing_lines_say_how_well_it_went_and_where_everything_is() -> None:
    lines = display.closing(SUMMARY, Path("runs/a"), Path("runs/a/m"), Path("runs/a/c.png")).splitlines()
    assert lines == [
        "12,345 model calls, 321 per second · engine busy during 71% of training",
        "processor time · driver: 30 s · rollout worker 0: 11 s",
        "new weights held generation up for 3 ms (median), 12 ms at most",
        "engine and trainer log-probs differ by at most 8e-06",
        "greedy 0.61 → 0.97 on 512 held-out tasks",
        "held-out success 0.41 → 0.93 in 58 s",
        "curve       runs/a/c.png",
        "run         runs/a",
        "model       runs/a/m",
        "talk to it  areal chat runs/a/m",
    ]


def test_run_without_held_out_tasks_has_no_verdict() -> None:
    bare = {key: value for key, value in SUMMARY.items() if key != "verdict"} | {"held_out": {}}
    text = display.closing(bare, Path("r"), Path("m"), Path("c"))
    assert "held-out" not in text
    assert "greedy" not in text


def test_stopped_run_says_how_to_go_on() -> None:
    text = display.stopped(Path("runs/sort/blue"), 7, 20)
    assert text.splitlines() == [
        "stopped after step 7 of 20; everything is saved in runs/sort/blue",
        "to go on, give the same command with trial_name=blue",
    ]
    assert "before the first step" in display.stopped(Path("runs/sort/blue"), 0, 20)


def test_resumed_run_says_where_it_resumes() -> None:
    threads = ThreadPlan(1, 1, "2 cores")
    assert display.hello(Path("runs/a"), 7, threads) == "run directory runs/a (resuming after step 7)\n2 cores"
    assert "resuming" not in display.hello(Path("runs/a"), 0, threads)
