"""What a run says at its start and at its end."""

from pathlib import Path
from typing import Any

from areal.trainer import notices

SUMMARY: dict[str, Any] = {
    "calls": 12345,
    "calls_per_second": 321.4,
    "overlap": 0.712,
    "cpu_seconds": {"driver": 30.2, "rollout worker 0": 11.0},
    "weight_pause_seconds": {"median": 0.0031, "max": 0.0124},
    "max_logprob_difference": 7.6e-06,
    "greedy_verdict": "greedy 0.61 → 0.97 on 512 held-out tasks",
    "verdict": "held-out success 0.41 → 0.93 in 58 s",
}


def test_closing_lines_say_how_well_it_went_and_where_everything_is() -> None:
    assert notices.results(SUMMARY) == [
        "12,345 model calls, 321 per second",
        "new weights held generation up for 3 ms (median), 12 ms at most",
        "log-probs of the engine and of the trainer differ by at most 8e-06",
    ]
    assert notices.verdicts(SUMMARY) == [
        "greedy 0.61 → 0.97 on 512 held-out tasks",
        "held-out success 0.41 → 0.93 in 58 s",
    ]
    assert notices.places(Path("runs/a"), Path("runs/a/m"), Path("runs/a/c.png")) == [
        "model       runs/a/m",
        "curve       runs/a/c.png",
        "look at it  areal view runs/a",
        "talk to it  areal chat runs/a",
    ]


def test_run_without_held_out_tasks_has_no_verdict() -> None:
    bare = {key: value for key, value in SUMMARY.items() if "verdict" not in key}
    text = "\n".join([*notices.results(bare), *notices.verdicts(bare)])
    assert "held-out" not in text
    assert "greedy" not in text


def test_log_probs_that_were_never_compared_are_not_said_to_be_equal() -> None:
    lines = notices.results(SUMMARY | {"max_logprob_difference": None})
    assert (
        "engine and trainer log-probs were not compared: no token of the weights in training had an advantage" in lines
    )
    assert not any("differ by at most" in line for line in lines)


def test_what_was_dropped_for_its_age_is_compared_with_what_was_trained() -> None:
    trained = {"groups": 90, "episode_seconds": 4.91, "episode_tokens": 80.4, "episode_reward": 0.5}
    dropped = {"groups": 10, "episode_seconds": 11.2, "episode_tokens": 131.0, "episode_reward": 0.254}
    line = (
        "10 groups (10.0%) were dropped as too old; their mean episode against the trained: seconds 11 against 4.9, "
        "tokens 131 against 80, reward 0.25 against 0.50; rollout.when_stale=wait trains them all"
    )
    assert line in notices.results(SUMMARY | {"trained": trained, "dropped": dropped})
    assert not any(
        "dropped" in each for each in notices.results(SUMMARY | {"trained": trained, "dropped": {"groups": 0}})
    )


def test_stopped_run_says_how_to_go_on() -> None:
    text = notices.stopped(Path("runs/sort/blue"), 7, 20)
    assert text.splitlines() == [
        "stopped after step 7 of 20; everything is saved in runs/sort/blue",
        "to go on, give the same command with trial_name=blue",
    ]
    assert "before the first step" in notices.stopped(Path("runs/sort/blue"), 0, 20)


def test_resumed_run_says_where_it_resumes() -> None:
    assert notices.hello(Path("runs/a"), 7)[0] == "run         runs/a (resuming after step 7)"


def test_new_run_says_how_to_look_at_it_unless_a_viewer_is_served() -> None:
    assert notices.hello(Path("runs/a"), 0) == ["run         runs/a", "look at it  areal view runs/a"]
    assert notices.hello(Path("runs/a"), 0, served=True) == ["run         runs/a"]
