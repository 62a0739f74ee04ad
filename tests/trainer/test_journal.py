"""A run's record: what a resumed run continues, held-out evaluations, overlap, and tokens per second."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import make_batch, make_conversation, make_directory, make_group

from areal.api.engine_api import WeightUpdate
from areal.api.messages import GroupResult
from areal.config.loader import build
from areal.rollout.pipeline import Tally
from areal.store.writer import StoreWriter
from areal.trainer.evaluation import wilson
from areal.trainer.journal import (
    AFTER,
    BEFORE,
    MAX_FIGURES,
    RATE_STEPS,
    Account,
    Journal,
    TokenRate,
    overlap,
    step_figures,
)
from areal.trainer.logs import read_lines, read_metrics
from areal.trainer.run_directory import RunDirectory
from areal.utils.closing import Closing

SUCCESS = [make_group(number, [reward]) for number, reward in enumerate([1, 1, 1, 0])]
FAILURE = [make_group(number, [reward]) for number, reward in enumerate([1, 0, 0, 0])]


class Record(Closing):
    """The journal of a run directory and the store that it is in."""

    def __init__(self, run: RunDirectory, step: int = 0, account: Account | None = None, total: int = 6) -> None:
        self.store = StoreWriter(run.path)
        self.journal = Journal(run, self.store, total, step, account or Account())

    def close(self) -> None:
        self.journal.close()
        self.store.close()

    def step(self, step: int, groups: list[GroupResult], dropped: Sequence[GroupResult] = (), **policy: float) -> None:
        """The tasks of each step are others, as in a run."""
        groups = [replace(group, task_id=100 * step + group.task_id) for group in groups]
        for group in groups:
            self.store.ready(group)
        figures = step_figures(groups, step, policy)
        weights = WeightUpdate(step, "digest", "")
        row = self.journal.commit(step, groups, weights, figures, dropped=Tally.of(dropped))
        self.journal.step(step, groups, row)

    def steps(self, steps: range) -> None:
        for step in steps:
            self.step(step, make_batch(seed=step), max_logprob_difference=step / 1000)


def test_what_an_agent_records_stands_beside_the_figures_of_the_run_and_replaces_none(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    groups = make_batch()
    figures = step_figures(groups, 1, {"loss": 0.5})
    own = ("step", "time_seconds", "tokens_per_second", "store_seconds")
    for name in (*figures, *own, "eval_reward", "mine", "huge"):
        groups[0].episodes[0].stats[name] = 1e308 if name == "huge" else float("nan") if name != "mine" else 7.0
    groups[0].episodes[1].stats["huge"] = 1e308
    with Record(run) as record:
        record.step(1, groups, loss=0.5)
        assert record.journal.account.calls == figures["calls"]
    (row,) = read_metrics(run.path)
    assert {name: row[name] for name in figures} == figures
    assert (row["step"], row["mine"], row["huge"]) == (1, 7.0, None)
    assert row["time_seconds"] > 0
    assert row["tokens_per_second"] > 0
    assert row["store_seconds"] > 0
    assert "eval_reward" not in row
    run.close()


def test_names_that_agents_record_are_bounded_over_a_run_and_its_resumption(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_directory(tmp_path)
    account = Account()
    for step in (1, 2):
        with Record(run, step - 1, account) as record:
            groups = make_batch()
            groups[0].episodes[0].stats |= {f"{step}/{number}": 1.0 for number in range(MAX_FIGURES)}
            groups[0].episodes[1].stats |= {"1/0": 3.0, "stats_dropped": 2.0}
            record.step(step, groups, loss=0.5)
            account = record.journal.account
    first, second = read_metrics(run.path)
    assert len(first.keys() | second.keys()) <= MAX_FIGURES + 8  # and what a row has besides figures
    assert (first["1/0"], second["1/0"]) == (2.0, 3.0)
    assert first["stats_dropped"] > 2.0
    assert second["stats_dropped"] == MAX_FIGURES + 2.0
    warnings = [record.getMessage() for record in caplog.records if "statistics may have" in record.getMessage()]
    assert len(warnings) == 2  # one for each session of the run
    assert "may have 64 names in an episode and 512 in a run" in warnings[0]
    run.close()


def test_dropped_groups_are_told_beside_the_trained_and_counted_over_all_sessions(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    account, groups = Account(), make_batch()
    for step in (1, 2):
        with Record(run, step - 1, account) as record:
            record.step(step, groups, FAILURE if step == 1 else [], expiring_wait_seconds=0.25)
            account = build(Account, asdict(record.journal.account))  # as a checkpoint keeps it
            summary = record.journal.summary()
    first, second = read_metrics(run.path)
    assert (first["dropped/reward"], first["expiring_wait_seconds"]) == (0.25, 0.25)
    assert "dropped/reward" not in second
    assert (summary["dropped"]["groups"], summary["dropped"]["episode_reward"]) == (4, 0.25)
    assert (summary["trained"]["groups"], summary["trained"]["tokens"]) == (2 * len(groups), 2 * first["tokens"])
    assert summary["expiring_wait_seconds"] == 0.5
    run.close()


def test_resumed_journal_goes_on_with_what_is_committed(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    with Record(run) as record:
        record.journal.evaluation(0, BEFORE, FAILURE, greedy=False)
        record.steps(range(1, 4))
        kept = record.journal.account
        record.steps(range(4, 6))
        record.store.take_back(3)
    with Record(run, 3, kept) as record:
        journal = record.journal
        assert journal.account.calls == kept.calls == 3 * 16 + 4
        assert journal.account.seconds >= kept.seconds
        assert journal.has_evaluation(BEFORE, greedy=False)
        assert not journal.has_evaluation(BEFORE, greedy=True)
        assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2, 3]
        record.steps(range(4, 7))
        journal.evaluation(6, AFTER, SUCCESS, greedy=False)
        summary = journal.summary()
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert [row["step"] for row in read_lines(run.path / "rollouts.jsonl")] == [
        step for step in range(1, 7) for _ in range(16)
    ]
    assert summary["calls"] == 6 * 16 + 8
    assert summary["store"]["bytes"] == (run.path / "run.db").stat().st_size
    assert summary["store"]["cpu_seconds"] > 0
    assert summary["max_logprob_difference"] == pytest.approx(0.006)
    assert summary["verdict"].startswith("held-out success 0.25 → 0.75 in ")
    assert summary["held_out"]["before"]["interval"] == pytest.approx(wilson(0.25, 4))
    assert summary["held_out"]["difference"]["mean"] == 0.5  # paired although `before` was read back
    assert "task_rewards" not in summary["held_out"]["after"]
    assert read_metrics(run.path)[-1]["eval_reward_high"] == pytest.approx(wilson(0.75, 4)[1])
    journal.draw()
    assert run.curve.exists()
    run.close()


def test_resumed_run_shows_what_was_held_out_as_last_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_directory(tmp_path)
    with Record(run) as record:
        record.journal.evaluation(0, BEFORE, FAILURE, greedy=False)
        record.journal.evaluation(0, BEFORE, SUCCESS, greedy=True)
        record.steps(range(1, 4))
        kept = record.journal.account
    capsys.readouterr()
    with Record(run, 3, kept) as record:
        record.steps(range(4, 5))
    assert "held-out 0.25" in capsys.readouterr().err
    run.close()


def test_run_killed_before_its_first_checkpoint_keeps_its_first_evaluation(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    with Record(run) as record:
        record.journal.evaluation(0, BEFORE, FAILURE, greedy=False)
        record.journal.evaluation(0, BEFORE, SUCCESS, greedy=True)
        record.steps(range(1, 3))
        record.store.take_back(0)
    with Record(run) as record:
        assert record.journal.has_evaluation(BEFORE, greedy=False)
        assert record.journal.has_evaluation(BEFORE, greedy=True)
    rows = read_metrics(run.path)
    assert [row["step"] for row in rows] == [0, 0]
    assert [row.get("eval_reward") or row.get("eval_greedy_reward") for row in rows] == [0.25, 0.75]
    run.close()


def test_an_evaluation_from_before_intervals_were_kept_is_still_compared_with(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    run.held_out.write_text('{"before": {"reward": 0.25, "tasks": 4, "rejected": 0, "is_success": true}}')
    with Record(run, 6, Account(seconds=1.0)) as record:
        journal = record.journal
        journal.evaluation(6, AFTER, SUCCESS, greedy=False)
        summary = journal.summary()
    assert summary["verdict"] == "held-out success 0.25 → 0.75 in 1 s"
    assert "difference" not in summary["held_out"]
    run.close()


def test_seconds_of_earlier_sessions_count(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    with Record(run, 3, Account(seconds=100.0, calls=7)) as record:
        record.journal.start_clock()
        summary = record.journal.summary()
    assert 100 <= summary["seconds"] < 130
    assert "verdict" not in summary
    run.close()


def test_a_run_in_which_nothing_was_compared_does_not_claim_a_difference_of_zero(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    with Record(run, total=2) as record:
        for step, seen in ((1, {}), (2, {"max_logprob_difference": 0.0})):
            record.step(step, make_batch(seed=step), **seen)
            assert record.journal.summary()["max_logprob_difference"] == (0.0 if seen else None)
    first, second = read_metrics(run.path)
    assert "max_logprob_difference" not in first
    assert second["max_logprob_difference"] == 0.0
    run.close()


def test_an_episode_counts_as_truncated_if_any_of_its_completions_was() -> None:
    whole, first, inner, last = (make_conversation() for _ in range(4))
    first.rows[0].truncated = True
    inner.rows[0].truncated_completions = [0]
    last.rows[-1].truncated = True
    group = GroupResult(0, [whole, first, inner, last], [], {})
    assert step_figures([group], 5, {})["truncated"] == 0.75


DAMAGED = [
    b"", b"{", b"[]", b"7", b"null", b'{"before": 3}', b'{"before": {"reward": "high"}}', b'{"x": {"y": 1}}', b"\xff"
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_evaluation_of_a_run_without_a_store_is_left_out_in_one_line(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_directory(tmp_path)
    run.held_out.write_bytes(content)
    with Record(run, 2) as record:
        assert not record.journal.has_evaluation(BEFORE, greedy=False)
        record.journal.evaluation(6, AFTER, SUCCESS, greedy=False)
        assert "verdict" not in record.journal.summary()
    (line,) = [line for line in caplog.messages if " damaged" in line]
    assert line.endswith("held_out.json is damaged; the baseline evaluation is lost")
    run.close()


@pytest.mark.parametrize("left", [b"{", None])
def test_what_the_store_knows_of_an_evaluation_is_exported_again(tmp_path: Path, left: bytes | None) -> None:
    run = make_directory(tmp_path)
    with Record(run) as record:
        record.journal.evaluation(0, BEFORE, FAILURE, greedy=False)
    whole = run.held_out.read_bytes()
    run.held_out.unlink()
    if left is not None:
        run.held_out.write_bytes(left)
    with Record(run) as record:
        assert record.journal.has_evaluation(BEFORE, greedy=False)
    assert run.held_out.read_bytes() == whole
    assert [row["eval_reward"] for row in read_metrics(run.path)] == [0.25]
    run.close()


Spans = list[tuple[float, float]]


def disjoint(edges: list[int]) -> Spans:
    ordered = sorted(set(edges))
    return [(float(a), float(b)) for a, b in zip(ordered[::2], ordered[1::2], strict=False)]


@given(st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_overlap_is_what_counting_every_instant_says(training_edges: list[int], producing_edges: list[int]) -> None:
    training, producing = disjoint(training_edges), disjoint(producing_edges)

    def inside(spans: Spans, instant: float) -> bool:
        return any(start <= instant < end for start, end in spans)

    instants = [each + 0.5 for each in range(41)]
    trained = [each for each in instants if inside(training, each)]
    both = [each for each in trained if inside(producing, each)]
    assert overlap(training, producing) == pytest.approx(len(both) / len(trained) if trained else 0.0)


def test_a_burst_and_a_pause_average_out_over_the_window() -> None:
    now = [0.0]
    rate_meter = TokenRate(lambda: now[0])
    rates = []
    for step in range(40):
        now[0] += 0.1 if step % 2 else 1.9
        rates.append(rate_meter.step(100))
    assert rates[0] == 100 / 1.9
    assert all(abs(rate - 100) < 1e-6 for rate in rates[RATE_STEPS - 1 :: 2])
    assert max(rates) < 115


def test_old_steps_are_forgotten() -> None:
    now = [0.0]
    rate_meter = TokenRate(lambda: now[0])
    for tokens in [1000] * 5 + [10] * RATE_STEPS:
        now[0] += 1
        rate = rate_meter.step(tokens)
    assert rate == 10
