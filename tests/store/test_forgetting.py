"""Tokens that are not to be kept leave the file, and what a resumed run may need does not."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from areal.api.errors import RejectReason
from areal.api.messages import Rejection
from areal.store import writer
from areal.store.reader import StoreReader
from areal.store.schema import STORE_FILE
from areal.store.writer import StoreWriter
from tests.store.test_store import episode, group, row, step_of

SAVED_EVERY, SAVED_KEPT = 4, 2


def run(directory: Path, first: int, last: int, keep_tokens: int | None, tokens: int = 8) -> None:
    """Steps of one group each, with checkpoints as a run writes and removes them."""
    draw = np.random.default_rng(first)
    with StoreWriter(directory, keep_tokens=keep_tokens) as store:
        for step in range(first, last + 1):
            drawn = dataclasses.replace(row(tokens), logprobs=draw.standard_normal(tokens).astype(np.float32))
            store.ready(group(step, dataclasses.replace(episode(), rows=[drawn])))
            store.step(step_of(step, step))
            if step % SAVED_EVERY == 0:
                store.checkpoint(step, f"step-{step}", "")
                store.checkpoints_removed(before_step=step - SAVED_EVERY * (SAVED_KEPT - 1))


def steps_with_tokens(directory: Path) -> list[int]:
    with StoreReader(directory) as reader:
        return [each.step for each in reader.steps() if reader.batch(each.step) is not None]


@pytest.mark.parametrize(
    ("keep_tokens", "first"), [(None, 1), (10, 8), (0, 13), (1, 13)], ids=["all", "ten", "none", "one"]
)
def test_the_newest_steps_keep_their_tokens_and_all_since_the_oldest_checkpoint(
    tmp_path: Path, keep_tokens: int | None, first: int
) -> None:
    run(tmp_path, 1, 17, keep_tokens)  # the checkpoints of 12 and 16 are there
    assert steps_with_tokens(tmp_path) == list(range(first, 18))


def test_without_a_checkpoint_everything_is_kept(tmp_path: Path) -> None:
    run(tmp_path, 1, SAVED_EVERY - 1, 0)
    assert steps_with_tokens(tmp_path) == [1, 2, 3]


def test_groups_that_are_not_trained_keep_their_tokens_and_rejected_ones_do_not(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, keep_tokens=0) as store:
        for task_id in (1, 2, 3):
            store.ready(group(task_id))
        store.rejected(group(2), Rejection(RejectReason.STALE, "too old"))
        store.step(step_of(1, 1))
        store.checkpoint(1, "step-1", "")
    with StoreReader(tmp_path) as reader:
        assert [each.task_id for each in reader.ready()] == [3]
        kept = [len(reader.episode(number).rows) for number in range(1, 7)]
        assert kept == [0, 0, 0, 0, 1, 1]


def test_a_group_that_runs_again_has_tokens_again(tmp_path: Path) -> None:
    run(tmp_path, 1, 9, 0)
    with StoreWriter(tmp_path) as store:
        store.take_back(0)
        store.started(1, 0, {})
        store.ready(group(1))
    with StoreReader(tmp_path) as reader:
        assert [each.task_id for each in reader.ready()] == [1]


def test_the_file_stays_as_small_as_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 steps with 16,384 tokens each, those of 8 fit into it, and it has grown by no more than what was said."""
    monkeypatch.setattr(writer, "VACUUM_PAGES", 8)
    tokens = 16_384
    (tmp_path / "all").mkdir()
    (tmp_path / "some").mkdir()
    run(tmp_path / "all", 1, 8, None, tokens)
    of_a_step = (tmp_path / "all" / STORE_FILE).stat().st_size / 8
    run(tmp_path / "some", 1, 40, 8, tokens)
    half = (tmp_path / "some" / STORE_FILE).stat().st_size
    run(tmp_path / "some", 41, 80, 8, tokens)
    whole = (tmp_path / "some" / STORE_FILE).stat().st_size
    assert whole < 12 * of_a_step
    assert whole - half < of_a_step


def test_a_file_that_kept_everything_shrinks_when_less_is_to_be_kept(tmp_path: Path) -> None:
    run(tmp_path, 1, 40, None, tokens=16_384)
    large = (tmp_path / STORE_FILE).stat().st_size
    run(tmp_path, 41, 44, 0, tokens=16_384)
    assert (tmp_path / STORE_FILE).stat().st_size < 0.3 * large


def test_the_log_of_changes_is_copied_to_the_file_after_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LOG_BYTES", 400_000)
    largest = 0
    with StoreWriter(tmp_path) as store:
        for step in range(1, 31):
            store.ready(group(step, dataclasses.replace(episode(), rows=[row(16_384)])))
            store.step(step_of(step, step))
            store.flush()
            largest = max(largest, (tmp_path / f"{STORE_FILE}-wal").stat().st_size)
        grown = (tmp_path / STORE_FILE).stat().st_size
    assert grown > 400_000
    assert largest < 1_200_000
