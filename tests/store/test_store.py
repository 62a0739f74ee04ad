"""What is handed to a run store is there when its process is killed, once, and comes back as it was."""

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from areal.api.errors import RejectReason
from areal.api.io_struct import Choices
from areal.api.messages import Episode, GroupResult, Node, Rejection, Row, TrainedRow
from areal.infra.status import of_wait
from areal.store.blobs import columns_of
from areal.store.reader import StoreReader
from areal.store.records import StepRecord
from areal.store.schema import MIGRATIONS, STORE_FILE, StoreError, StoreGone
from areal.store.writer import StoreWriter
from areal.utils import waits
from areal.utils.waits import Waits

NO_FIGURES: dict[str, float | None] = {}


def row(length: int = 8, version: int = 0) -> Row:
    sampled = np.arange(length) >= length // 2
    return Row(
        input_ids=np.arange(length, dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.1 * np.arange(length), 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        returns=sampled.astype(np.float32),
        completion_index=np.where(sampled, 0, -1).astype(np.int32),
        temperatures=np.ones(length, np.float32),
        reward=1.0,
    )


def episode(text: str = "seven", reward: float = 1.0, version: int = 0) -> Episode:
    said = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": text}]
    return Episode([row(version=version)], reward, said, {"score": 0.5}, calls=1, seconds=0.25, turns=[(0.0, 0.2, 4)])


def group(task_id: int, *episodes: Episode) -> GroupResult:
    return GroupResult(task_id, list(episodes) or [episode(), episode("eight", 0.0)], [], {0: "d0"})


def step_of(number: int, *batch: int) -> StepRecord:
    return StepRecord(number, number, f"digest {number}", batch, {"reward": 0.5, "unknown": None}, {"calls": 3})


def same(one: GroupResult, other: GroupResult) -> bool:
    """Bit by bit: arrays compare by their bytes."""
    return _plain(one) == _plain(other)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def test_a_group_comes_back_bit_by_bit_when_it_is_ready_and_when_it_is_trained(tmp_path: Path) -> None:
    sent = group(5)
    with StoreWriter(tmp_path) as store:
        store.started(5, 0, {"question": "3 + 4?"})
        store.ready(sent)
        store.flush()
        with StoreReader(tmp_path) as reader:
            (found,) = reader.ready()
            assert same(found, sent)
        store.step(step_of(1, 5))
        with StoreReader(tmp_path) as reader:
            assert reader.ready() == []
            batch = reader.batch(1)
            assert batch is not None
            assert same(batch[0], sent)


def test_what_was_asked_of_an_episode_before_is_not_stored_with_it(tmp_path: Path) -> None:
    sent = group(5)
    versions = [episode.oldest_version for episode in sent.episodes]
    with StoreWriter(tmp_path) as store:
        store.ready(sent)
    with StoreReader(tmp_path) as reader:
        (found,) = reader.ready()
    assert same(found, sent)
    assert [episode.oldest_version for episode in found.episodes] == versions


def test_a_batch_keeps_its_order(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        for task_id in range(4):
            store.ready(group(task_id))
        store.step(step_of(1, 2, 0, 3))
    with StoreReader(tmp_path) as reader:
        batch = reader.batch(1)
        assert batch is not None
        assert [each.task_id for each in batch] == [2, 0, 3]
        assert [each.task_id for each in reader.ready()] == [1]
        assert list(reader.metrics()) == [{"step": 1, "reward": 0.5, "unknown": None}]
        (step,) = reader.steps()
        assert (step.digest, step.account) == ("digest 1", {"calls": 3})


@pytest.mark.slow
def test_what_was_committed_survives_a_kill(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from tests.store.test_store import *\n"
        "store = StoreWriter(Path(sys.argv[1]))\n"
        "store.started(9, 0, {})\n"
        "[store.ready(group(task_id)) for task_id in range(3)]\n"
        "store.step(step_of(1, 0, 1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parents[2])], timeout=60)
    assert done.returncode == -signal.SIGKILL
    with StoreWriter(tmp_path) as store:
        store.session(1, {})
    with StoreReader(tmp_path) as reader:
        assert reader.states() == {"trained": 2, "ready": 1, "retry": 1}
        assert sorted(reader.settled()) == [0, 1]


def test_a_step_that_trains_a_group_twice_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path)
    store.ready(group(0))
    store.step(step_of(1, 0))
    with pytest.raises(StoreError, match="task 0, which was not ready"):
        store.step(step_of(2, 0))
    store.close()
    with StoreReader(tmp_path) as reader:
        assert [each.step for each in reader.steps()] == [1]


def test_each_episode_that_is_rejected_keeps_its_reason_and_traceback(tmp_path: Path) -> None:
    failed = Rejection(RejectReason.AGENT_ERROR, "it raised", "Traceback: here")
    with StoreWriter(tmp_path) as store:
        store.rejected(GroupResult(1, [], [failed], {}), failed)
        store.ready(group(2))
        store.rejected(group(2), Rejection(RejectReason.STALE, "too old"))
    with StoreReader(tmp_path) as reader:
        assert [(each["task_id"], each["reason"], each["trace"]) for each in reader.rejections()] == [
            (1, "agent_error", "Traceback: here"),
            (2, "stale", ""),
            (2, "stale", ""),
        ]
        assert reader.rejected() == {"agent_error": 1, "stale": 2}
        assert reader.states() == {"rejected": 2}


def test_steps_that_are_taken_back_give_their_groups_back(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        for step in (1, 2, 3):
            store.ready(group(step))
            store.step(step_of(step, step))
        store.take_back(1)
    with StoreReader(tmp_path) as reader:
        assert [each.step for each in reader.steps()] == [1]
        assert reader.states() == {"trained": 1, "retry": 2}
        assert [each["step"] for each in reader.metrics()] == [1]


def test_forgotten_tokens_leave_conversations(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        for step in (1, 2):
            store.ready(group(step))
            store.step(step_of(step, step))
        store.forget_tokens(before_step=2)
    with StoreReader(tmp_path) as reader:
        assert reader.batch(1) is None
        assert reader.batch(2) is not None
        assert reader.episode(1).messages == episode().messages


def test_the_tree_of_an_episode_comes_back(tmp_path: Path) -> None:
    ask, answer = {"role": "user", "content": "Sort 21"}, {"role": "assistant", "content": "12"}
    nodes = [
        Node(None, False, [ask], answer, None, "stop", ["add"], 0.1, 0.2),
        Node(0, True, [ask], answer, 1.0, "length", [], 0.3, 0.4),
    ]
    with StoreWriter(tmp_path) as store:
        store.ready(group(0, dataclasses.replace(episode(), nodes=nodes)))
        store.step(step_of(1, 0))
    with StoreReader(tmp_path) as reader:
        assert reader.episode(1).nodes == nodes


def test_what_the_trainer_computed_comes_back(tmp_path: Path) -> None:
    computed = TrainedRow(np.array([1, np.nan], np.float32), np.array([-0.5, -0.25], np.float32))
    with StoreWriter(tmp_path) as store:
        store.ready(group(4))
        store.step(dataclasses.replace(step_of(1, 4), trained={4: [[], [computed]]}))
    with StoreReader(tmp_path) as reader:
        assert reader.trained_rows(1) == []
        (found,) = reader.trained_rows(2)
        np.testing.assert_array_equal(found.advantages, computed.advantages)
        np.testing.assert_array_equal(found.logprobs, computed.logprobs)


@pytest.mark.parametrize("text", ["\ud800 half of a pair", "\x00 nothing", "أهلا", "<b>&", "x" * 1_000_000])
def test_whatever_a_model_says_is_kept(tmp_path: Path, text: str) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    said = Episode([row()], 1.0, [{"role": "assistant", "content": text}, {**call, "number": 2**80}])
    with StoreWriter(tmp_path) as store:
        store.started(0, 0, {"question": text, "object": object(), "large": 2**80})
        store.ready(group(0, said))
        store.step(step_of(1, 0))
    with StoreReader(tmp_path) as reader:
        assert reader.episode(1).messages == said.messages


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """SQLite says the same of a file that may not grow."""
    lines: list[str] = []
    full = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        full.set()

    store = StoreWriter(tmp_path, say=say)
    store.flush()
    _limit_pages(store, 1)
    store.ready(large_group())
    assert full.wait(30)
    _limit_pages(store, 1_000_000)
    store.step(step_of(1, 0))
    store.close()
    assert [line.split(" (")[0] for line in lines[:1]] == [f"no room to write {store.path}"]
    assert "goes on" in lines[1]
    with StoreReader(tmp_path) as reader:
        assert reader.states() == {"trained": 1}


def test_whoever_waits_for_a_full_disk_says_so(tmp_path: Path) -> None:
    full, part = threading.Event(), Waits()
    store = StoreWriter(tmp_path, patience_seconds=60.0, say=lambda line: full.set())
    store.flush()
    _limit_pages(store, 1)
    store.ready(large_group())
    assert full.wait(30)

    def commit() -> None:
        with waits.of(part):
            store.step(step_of(1, 0))

    with ThreadPoolExecutor(1) as threads:
        committed = threads.submit(commit)
        while not (now := part.now()):
            assert not committed.done()
        told = of_wait("the trainer", now[0])
        _limit_pages(store, 1_000_000)
        committed.result(60)
    store.close()
    assert told.what == f"waits for room on the disk of {store.path}"
    assert told.limit == "store.full_disk_seconds=60"


def test_a_disk_that_stays_full_ends_the_run_with_a_remedy(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, patience_seconds=0.0)
    store.flush()
    _limit_pages(store, 1)
    store.ready(large_group())
    with pytest.raises(StoreError, match="free some space"):
        store.step(step_of(1, 0))
    with pytest.raises(StoreError, match="free some space"):
        store.event("death", {})
    store.close()


@pytest.mark.parametrize("removed", ["run.db", "run.db*"])
def test_a_store_that_is_removed_during_a_run_is_not_taken_for_a_full_disk(tmp_path: Path, removed: str) -> None:
    with StoreWriter(tmp_path) as store:
        store.flush()
        for path in tmp_path.glob(removed):
            path.unlink()
        store.event("death", {})  # SQLite itself does not look for the file
        with pytest.raises(StoreGone, match=r"was removed or moved .* it goes on from its newest checkpoint, or"):
            store.flush()


def large_group() -> GroupResult:
    """It does not fit into what a new file has."""
    return group(0, episode(os.urandom(100_000).hex()))


def _limit_pages(store: StoreWriter, most: int) -> None:
    store._connection.execute(f"PRAGMA max_page_count = {most}")  # it is never below what the file has


def test_a_store_of_a_newer_version_is_refused_with_a_remedy(tmp_path: Path) -> None:
    StoreWriter(tmp_path).close()
    with sqlite3.connect(tmp_path / STORE_FILE) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    opens: tuple[Callable[[Path], object], ...] = (StoreWriter, StoreReader)
    for opened in opens:
        with pytest.raises(StoreError, match="install a newer one"):
            opened(tmp_path)


def test_a_damaged_store_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / STORE_FILE).write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match="put a copy back"):
        StoreWriter(tmp_path)
    with pytest.raises(StoreError, match="put a copy back"):
        StoreReader(tmp_path)
    os.unlink(tmp_path / STORE_FILE)
    with pytest.raises(StoreError, match="no run store"):
        StoreReader(tmp_path)


def test_damage_that_is_found_while_reading_is_explained_too(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        for step in (1, 2, 3):
            store.ready(group(step))
            store.step(step_of(step, step))
    with sqlite3.connect(tmp_path / STORE_FILE) as db:
        db.execute("UPDATE rows SET data = x'00' WHERE task_id = 2")
    with pytest.raises(StoreError, match="put a copy back"), StoreReader(tmp_path) as reader:
        reader.batch(2)
    db.close()
    with open(tmp_path / STORE_FILE, "r+b") as file:
        file.seek(4096)  # after the names of the tables
        file.write(b"damaged " * (os.path.getsize(file.name) // 8 - 512))
    with pytest.raises(StoreError, match="put a copy back"), StoreReader(tmp_path) as reader:
        reader.steps()
    with pytest.raises(StoreError, match="put a copy back"):
        StoreWriter(tmp_path)


def test_a_store_in_a_directory_that_cannot_be_written_to_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreWriter(tmp_path) as store:
        store.ready(group(1))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with StoreReader(tmp_path) as reader:
        assert reader.states() == {"ready": 1}
    assert [path.name for path in tmp_path.iterdir()] == [STORE_FILE]


def test_what_tokens_were_drawn_from_comes_back_and_costs_nothing_where_it_was_everything(tmp_path: Path) -> None:
    ordinary, drawn = group(1), group(2)
    sizes, ids = np.array([2, 1], np.int32), np.array([3, 9, 4], np.int32)
    first, second = (each.rows[0] for each in drawn.episodes)
    first.choices = [Choices(4, 6, sizes=sizes, ids=ids), Choices(6, 8, greedy=True)]
    second.choices = [Choices(4, 8, grammar_kind="lark", grammar_text='start: "a"', stops=[7], min_new_tokens=2)]
    with StoreWriter(tmp_path) as store:
        store.ready(ordinary)
        store.ready(drawn)
        store.step(step_of(1, 1, 2))
    with StoreReader(tmp_path) as reader:
        back = reader.batch(1)
        assert reader.altered(1) == []
    assert back is not None
    assert [same(*pair) for pair in zip(back, (ordinary, drawn), strict=True)] == [True, True]
    assert "choices" not in columns_of([each.rows for each in ordinary.episodes])
