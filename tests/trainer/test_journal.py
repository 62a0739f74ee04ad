"""A resumed run's journal goes on: counts, seconds, rows, and what was measured before the first step."""

from pathlib import Path

import pytest
from small_runs import make_batch, make_directory, make_group

from areal.trainer.journal import AFTER, BEFORE, Account, Journal, step_figures
from areal.trainer.logs import read_lines, read_metrics

SUCCESS = [make_group(number, [reward]) for number, reward in enumerate([1, 1, 1, 0])]
FAILURE = [make_group(number, [reward]) for number, reward in enumerate([1, 0, 0, 0])]


def take_steps(journal: Journal, steps: range) -> None:
    for step in steps:
        groups = make_batch(seed=step)
        journal.step(step, groups, step_figures(groups, step, {"max_logprob_difference": step / 1000}))


def test_resumed_journal_drops_what_was_never_saved_and_goes_on(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    with Journal(run, 6, 0, Account()) as journal:
        journal.evaluation(0, BEFORE, FAILURE, greedy=False)
        take_steps(journal, range(1, 4))
        saved = journal.account
        take_steps(journal, range(4, 6))  # lost: the run is killed before its next checkpoint
    with Journal(run, 6, 3, saved) as journal:
        assert journal.account.calls == saved.calls == 3 * 16 + 4
        assert journal.account.seconds >= saved.seconds
        assert journal.remembers(BEFORE, greedy=False)
        assert not journal.remembers(BEFORE, greedy=True)
        take_steps(journal, range(4, 7))
        journal.evaluation(6, AFTER, SUCCESS, greedy=False)
        summary = journal.summary()
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert [row["step"] for row in read_lines(run.path / "rollouts.jsonl")] == [
        step for step in range(1, 7) for _ in range(16)
    ]
    assert summary["calls"] == 6 * 16 + 8
    assert summary["max_logprob_difference"] == pytest.approx(0.006)
    assert summary["verdict"].startswith("held-out success 0.25 → 0.75 in ")
    assert journal.draw().exists()
    run.close()


def test_run_killed_before_its_first_checkpoint_keeps_its_first_evaluation(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    with Journal(run, 6, 0, Account()) as journal:
        journal.evaluation(0, BEFORE, FAILURE, greedy=False)
        journal.evaluation(0, BEFORE, SUCCESS, greedy=True)
        take_steps(journal, range(1, 3))
    with Journal(run, 6, 0, Account()) as journal:
        assert journal.remembers(BEFORE, greedy=False)
        assert journal.remembers(BEFORE, greedy=True)
    rows = read_metrics(run.path)
    assert [row["step"] for row in rows] == [0, 0]
    assert [row.get("eval_reward") or row.get("eval_greedy_reward") for row in rows] == [0.25, 0.75]
    run.close()


def test_seconds_of_earlier_sessions_count(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    with Journal(run, 6, 3, Account(seconds=100.0, calls=7)) as journal:
        journal.start_clock()
        summary = journal.summary()
    assert 100 <= summary["seconds"] < 130
    assert "verdict" not in summary
    run.close()
