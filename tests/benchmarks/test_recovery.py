"""The recovery benchmark runs, in a size that proves little else, and its witnesses see every damage."""

import json
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from areal.api.errors import RejectReason
from areal.api.messages import Episode, GroupResult, Rejection, Row
from areal.store.records import StepRecord
from areal.store.schema import STORE_FILE
from areal.store.writer import StoreWriter
from areal.trainer.checkpoint import MANIFEST_FILE, checkpoint_digest
from benchmarks.attacked_run import BATCH, SAMPLES
from benchmarks.recovery import DRIVER, QUICK, Kill, KilledRun, Losses, examine, harm_of, run

STEPS, TOKENS, STALENESS = 3, 4, 0


@pytest.mark.timeout(600)  # it starts some twenty processes, one after another
def test_a_few_kills_lose_nothing(tiny_math: Path) -> None:
    figures, aims = run(seed=1, counts=QUICK)
    assert [aim for aim in aims if not aim.met and "store" not in aim.aim] == []
    figures = json.loads(json.dumps(figures))
    assert sum(figures["kills"]["attacks"].values()) == QUICK.kills
    assert figures["store"]["bytes_per_token"] > 0


class EndedRun(KilledRun):
    """One whose driver has ended after a run in which nothing was killed."""

    def start(self, moment: str = "") -> None:
        self.starts.append(time.time())
        self.driver = subprocess.Popen([sys.executable, "-c", ""])
        self.checkpoint = self.directory / "checkpoints" / f"step-{self.steps:06d}"
        self.checkpoint.mkdir(parents=True)
        (self.place / "output").write_text("")
        steps = range(1, self.steps + 1)
        self.write("summary.json", [{"rejections": {}}])
        self.write("metrics.jsonl", [{"step": step, "reward": 1.0} for step in steps])
        self.write("rollouts.jsonl", [line for step in steps for line in exported(step)])
        self.sample(range(self.steps * BATCH), self.starts[0])
        self.save_checkpoint()
        with StoreWriter(self.directory) as store:
            store.session(0, {})
            for step in steps:
                for task in tasks_of(step):
                    store.started(task, step - 1, {})
                    store.ready(group(task, step - 1))
                store.step(StepRecord(step, step, f"digest {step}", tasks_of(step), {"reward": 1.0}, {}))
                store.event("published", {"version": step})
            store.checkpoint(self.steps, self.checkpoint.name, checkpoint_digest(self.checkpoint))

    def write(self, name: str, rows: list[dict[str, object]]) -> None:
        (self.directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def sample(self, tasks: range, began: float) -> None:
        """As the agents of these tasks do."""
        lines = [
            {"task": task, "seed": seed, "began": began, "tokens": TOKENS} for task in tasks for seed in range(SAMPLES)
        ]
        with self.sampled.open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)

    def save_checkpoint(self) -> None:
        model = b"weights"
        (self.checkpoint / "model").write_bytes(model)
        listed = {"model": {"bytes": len(model), "crc32": f"{zlib.crc32(model):08x}"}}
        (self.checkpoint / MANIFEST_FILE).write_text(json.dumps({"files": listed}))

    def alter(self, change: str) -> None:
        """The store, behind the back of the run."""
        with sqlite3.connect(self.directory / STORE_FILE) as db:
            db.execute(change)
        db.close()


def tasks_of(step: int) -> list[int]:
    return list(range((step - 1) * BATCH, step * BATCH))


def exported(step: int) -> list[dict[str, object]]:
    """The lines of a step in which each group was trained once."""
    return [{"step": step, "task_id": task} for task in tasks_of(step) for _ in range(SAMPLES)]


def group(task: int, version: int) -> GroupResult:
    sampled = np.ones(TOKENS, bool)
    row = Row(
        input_ids=np.arange(TOKENS, dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.zeros(TOKENS, np.float32),
        versions=np.full(TOKENS, version, np.int32),
        returns=np.ones(TOKENS, np.float32),
        completion_index=np.zeros(TOKENS, np.int32),
        temperatures=np.ones(TOKENS, np.float32),
        reward=1.0,
    )
    episodes = [Episode([row], 1.0, [], {}, calls=1, seconds=0.1) for _ in range(SAMPLES)]
    return GroupResult(task, episodes, [], {})


def harm(ended: EndedRun) -> dict[str, int]:
    """All that the witnesses report and that is not 0."""
    losses = Losses()
    with ended:
        ended.driver.wait()
        harmed = examine(ended, 0, STALENESS, losses)
    found = {name: value for name, value in harm_of(losses).items() if value}
    assert harmed == bool(found)
    return found


@pytest.fixture
def ended(tmp_path: Path) -> EndedRun:
    return EndedRun(tmp_path / "run", STEPS)


def test_run_that_lost_nothing_shows_no_harm(ended: EndedRun) -> None:
    assert harm(ended) == {}


def test_group_that_was_trained_twice_is_seen(ended: EndedRun) -> None:
    again = [{"step": 3, "task_id": 1}] * SAMPLES
    ended.write("rollouts.jsonl", [*exported(1), *exported(2), *exported(3), *again])
    assert harm(ended) == {"doubled_groups": 1}


def test_step_with_too_many_groups_is_seen(ended: EndedRun) -> None:
    ended.alter("INSERT INTO groups (task_id, state, began, began_version, step) VALUES (99, 'trained', 0, 0, 2)")
    assert harm(ended) == {"doubled_groups": 1}


@pytest.mark.parametrize(
    "loss",
    [
        lambda ended: ended.alter("UPDATE groups SET state = 'ready', step = NULL WHERE task_id = 0"),
        lambda ended: ended.alter("UPDATE groups SET state = 'retry', step = NULL WHERE task_id = 0"),
        lambda ended: ended.alter("UPDATE groups SET step = 2 WHERE task_id = 0"),
        lambda ended: ended.write("rollouts.jsonl", [*exported(1)[1:], *exported(2), *exported(3)]),
    ],
    ids=["still ready", "to be tried again", "exported with another step", "exported in part"],
)
def test_group_that_was_lost_is_seen(ended: EndedRun, loss: Callable[[EndedRun], None]) -> None:
    loss(ended)
    assert harm(ended)["lost_groups"] == 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda ended: ended.alter("DELETE FROM steps WHERE step = 2"),
        lambda ended: ended.write("metrics.jsonl", [{"step": step, "reward": 1.0} for step in (1, 3)]),
    ],
    ids=["in the store", "in the metrics"],
)
def test_step_that_is_missing_is_seen(ended: EndedRun, loss: Callable[[EndedRun], None]) -> None:
    loss(ended)
    assert harm(ended) == {"missing_steps": 1}


def test_step_that_was_taken_twice_is_seen(ended: EndedRun) -> None:
    ended.write("metrics.jsonl", [{"step": step, "reward": 1.0} for step in (1, 2, 2, 3)])
    assert harm(ended) == {"doubled_groups": BATCH}


def test_finished_group_that_was_sampled_again_is_work_thrown_away(ended: EndedRun) -> None:
    at = ended.starts[0] + 1
    ended.kills.append(Kill(at, DRIVER, "", ended=frozenset({0, 1})))
    ended.sample(range(1, 3), at + 1)
    assert harm(ended) == {"thrown_away_tokens": TOKENS * SAMPLES}, "that of task 1; task 2 was running"


def test_group_that_was_sampled_again_without_a_kill_is_work_thrown_away(ended: EndedRun) -> None:
    ended.sample(range(1), ended.starts[0] + 1)
    ended.kills.append(Kill(ended.starts[0] + 2, DRIVER, "", ended=frozenset()))
    assert harm(ended) == {"thrown_away_tokens": TOKENS * SAMPLES}


def test_tokens_that_no_agent_sampled_are_seen(ended: EndedRun) -> None:
    ended.alter(f"UPDATE episodes SET tokens = {TOKENS + 1} WHERE task_id = 3 AND sample = 0")
    assert harm(ended) == {"altered_groups": 1}


def test_group_that_was_rejected_is_seen(ended: EndedRun) -> None:
    with StoreWriter(ended.directory) as store:
        store.rejected(GroupResult(6, [], [], {}), Rejection(RejectReason.STALE, "older than 0 versions"))
    assert harm(ended) == {"rejected_groups": 1}


def test_episode_that_was_too_old_is_seen(ended: EndedRun) -> None:
    ended.alter("UPDATE episodes SET staleness = 1 WHERE task_id = 3 AND sample = 0")
    assert harm(ended) == {"stale_episodes": 1}


def test_versions_and_steps_that_go_back_are_seen(ended: EndedRun) -> None:
    with StoreWriter(ended.directory) as store:
        store.event("published", {"version": 1})
        store.session(1, {})
    assert harm(ended) == {"versions_back": 1, "steps_taken_back": 2}


def test_resumed_run_that_came_to_other_weights_is_seen(ended: EndedRun) -> None:
    (ended.place / "output").write_text(
        "step 2, trained again from its stored batch, gives other\nweights than it gave: …"
    )
    assert harm(ended) == {"steps_with_other_weights": 1}


def test_checkpoints_that_are_damaged_partial_or_unknown_are_seen(ended: EndedRun) -> None:
    (ended.checkpoint / "model").write_bytes(b"Weights")
    (ended.directory / "checkpoints" / ".step-000002.partial").mkdir()
    assert harm(ended) == {"damaged_checkpoints": 2}


def test_last_checkpoint_that_is_missing_is_seen(ended: EndedRun) -> None:
    ended.checkpoint.rename(ended.checkpoint.with_name("step-000002"))
    ended.alter("UPDATE checkpoints SET name = 'step-000002'")
    assert harm(ended) == {"damaged_checkpoints": 1}
