"""The survival benchmark runs, in a size that proves little else, and sees the damage that it looks for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.attacked_run import BATCH, SAMPLES, TOKEN, AttackedRun, Damage
from benchmarks.survival import QUICK, examine, run


@pytest.mark.timeout(600)  # it starts some twenty processes, one after another
def test_a_few_attacks_of_each_kind_do_no_harm(tiny_math: Path) -> None:
    figures, aims = run(seed=1, counts=QUICK)
    assert [aim for aim in aims if not aim.met] == []
    figures = json.loads(json.dumps(figures))
    assert sum(figures["kills"]["attacks"].values()) == QUICK.kills
    assert figures["cancellations"]["outcomes"]["bystander: answered"] > 0


class EndedRun(AttackedRun):
    """One whose driver has ended and left what a test writes."""

    def start(self, moment: str = "") -> None:
        self.driver = subprocess.Popen([sys.executable, "-c", ""])
        self.directory.mkdir(parents=True)
        (self.place / "output").write_text("")
        self.write("summary.json", [{"rejections": {}}])
        self.write("metrics.jsonl", [{"step": step, "reward": 1.0} for step in range(1, self.steps + 1)])
        self.write("rollouts.jsonl", [line for step in range(1, self.steps + 1) for line in trained(step)])

    def write(self, name: str, rows: list[dict[str, object]]) -> None:
        (self.directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def leave_process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | {TOKEN: self._token}
        )


def trained(step: int) -> list[dict[str, object]]:
    """The lines of a step in which each group was trained once."""
    tasks = range((step - 1) * BATCH, step * BATCH)
    return [{"step": step, "task_id": task} for task in tasks for _ in range(SAMPLES)]


def seen(ended: AttackedRun, code: int | None = 0) -> dict[str, int]:
    """All damage of a run that is not 0."""
    damage = Damage()
    with ended:
        ended.driver.wait()
        examine(ended, code, damage)
    return {name: value for name, value in vars(damage).items() if value and name != "runs"}


def test_run_that_came_to_no_harm_shows_none(tmp_path: Path) -> None:
    assert seen(EndedRun(tmp_path, 3, "any")) == {}


def test_groups_that_were_lost_or_trained_twice_are_seen(tmp_path: Path) -> None:
    ended = EndedRun(tmp_path, 3, "any")
    again: list[dict[str, object]] = [{"step": 3, "task_id": 1}] * SAMPLES
    ended.write("rollouts.jsonl", [*trained(1), *trained(2), *trained(3)[SAMPLES:-1], *again])
    assert seen(ended) == {"lost_groups": 2, "doubled_groups": 1}, "one is missing, one incomplete, one there twice"


def test_steps_that_were_lost_or_taken_twice_are_seen(tmp_path: Path) -> None:
    ended = EndedRun(tmp_path, 3, "any")
    ended.write("metrics.jsonl", [{"step": step, "reward": 1.0} for step in (1, 1, 2)])
    assert seen(ended) == {"lost_groups": BATCH, "doubled_groups": BATCH}


def test_what_a_run_leaves_behind_is_seen_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.attacked_run.END_SECONDS", 0.5)
    ended = EndedRun(tmp_path, 3, "any")
    left = [tmp_path / "tmp" / "areal-1", tmp_path / "areal-shared"]
    for directory in left:
        directory.mkdir()
    (tmp_path / "notes").write_text(f"{left[1]}\n")
    with ended.leave_process() as orphan:
        assert seen(ended) == {"orphans": 1, "leaked_shared_memory": 1, "leaked_directories": 1}
        assert orphan.wait(20) != 0
    assert not any(directory.exists() for directory in left)


def test_death_that_was_no_attack_is_seen(tmp_path: Path) -> None:
    ended = EndedRun(tmp_path, 3, "any")
    ended.attacked.add(1)
    how = "was killed by signal 9 (SIGKILL); it is started again"
    (tmp_path / "output").write_text(f"engine (pid 1) {how}\nengine (pid 2) {how}\nrollout worker 0 (pid 3) {how}\n")
    assert seen(ended) == {"restarts": 3, "engine_deaths": 1, "worker_deaths": 1}


def test_run_that_hangs_is_seen_and_ended(tmp_path: Path) -> None:
    ended = EndedRun(tmp_path, 3, "any")
    with ended.leave_process() as hanging:
        assert seen(ended, code=None) == {"hangs": 1}
        assert hanging.wait(20) != 0


def test_run_that_fails_is_seen(tmp_path: Path) -> None:
    assert seen(EndedRun(tmp_path, 3, "any"), code=1) == {"failed_runs": 1}
