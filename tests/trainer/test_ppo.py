"""Whole runs of the trainer on a fleet without processes: what they write down, and how they go on."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fleet_of_groups import TASKS, FleetOfGroups, ppo_config, run, save_model
from small_runs import make_engine, make_group

from areal.api.errors import ArealError, EngineError, RejectReason, RunExists
from areal.api.messages import GroupResult, Rejection
from areal.config.experiment import DatasetConfig, PPOConfig
from areal.config.rollout import GenerationHyperparameters, RolloutConfig
from areal.config.training import (
    EvaluatorConfig,
    OptimizerConfig,
    RecoverConfig,
    ReferenceConfig,
    SaverConfig,
    StoreConfig,
)
from areal.engine.models import open_trainable
from areal.engine.training.engine import ScoringEngine, TokenBatch
from areal.engine.training.learner import Learner, LogProbs
from areal.engine.training.packing import Span
from areal.rollout.admission import Admission
from areal.rollout.pipeline import GroupRecord
from areal.store.reader import StoreReader
from areal.store.schema import STORE_FILE, StoreGone
from areal.trainer import learners
from areal.trainer import run as trainer_run
from areal.trainer.checkpoint import NoRoom
from areal.trainer.logs import read_lines, read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", make_engine())


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_lines(path)]


def test_a_step_whose_weights_could_not_be_published_is_written_down_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = ppo_config(tmp_path, model), tmp_path / "test/one"
    with pytest.raises(EngineError, match="refuses the weights"):
        run(config, monkeypatch, FleetOfGroups(fails_at=2))
    assert (run_dir / "checkpoints/step-000002").is_dir()
    assert steps_in(run_dir / "metrics.jsonl") == [1, 2]
    assert steps_in(run_dir / "rollouts.jsonl") == [1] * 8 + [2] * 8
    again = FleetOfGroups()
    run(config, monkeypatch, again)
    assert again.taken == [4, 5, 6, 7]
    assert steps_in(run_dir / "metrics.jsonl") == [1, 2, 3, 4]
    assert steps_in(run_dir / "rollouts.jsonl") == [step for step in (1, 2, 3, 4) for _ in range(8)]
    tasks = [row["task_id"] for row in read_lines(run_dir / "rollouts.jsonl")]
    assert tasks == [task for task in range(8) for _ in range(4)]
    assert all("step_seconds" in row for row in read_metrics(run_dir))


class RejectingFleet(FleetOfGroups):
    """Rejects two episodes before its first step."""

    def begin(
        self,
        tasks: Iterator[tuple[int, dict[str, Any]]],
        admission: Admission,
        keep: object,
        record: GroupRecord,
        ready: Sequence[GroupResult],
    ) -> None:
        super().begin(tasks, admission, keep, record, ready)
        record.rejected(make_group(next(tasks)[0], [0, 1]), Rejection(RejectReason.FILTERED, "not this one"))
        self.rejections.counts[RejectReason.FILTERED] += 2


def test_rejections_are_those_of_the_whole_run_however_often_it_was_resumed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ppo_config(tmp_path, model)
    with pytest.raises(EngineError):
        run(config, monkeypatch, RejectingFleet(fails_at=2))
    result = run(config, monkeypatch, RejectingFleet())
    assert result.summary["rejections"] == {"filtered": 4}
    assert [row["rejected/filtered"] for row in read_metrics(result.run_dir)] == [2, 2, 4, 4]
    with StoreReader(result.run_dir) as reader:
        assert reader.rejected() == {"filtered": 4}


def test_tokens_that_no_checkpoint_needs_are_forgotten_where_none_are_to_be_kept(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, store = SaverConfig(freq_steps=1, keep=2), StoreConfig(keep_tokens="none")
    run(ppo_config(tmp_path, model, saver=saver, store=store), monkeypatch)
    with StoreReader(tmp_path / "test/one") as reader:
        assert [each["step"] for each in reader.checkpoints()] == [3, 4]
        assert [step for step in (1, 2, 3, 4) if reader.batch(step) is not None] == [4]
    assert steps_in(tmp_path / "test/one/rollouts.jsonl") == [step for step in (1, 2, 3, 4) for _ in range(8)]


def test_a_run_that_ends_for_a_full_disk_has_waited_for_it_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> None:
        raise NoRoom("the checkpoint cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(trainer_run, "begin_checkpoint", full)
        with pytest.raises(NoRoom):
            run(ppo_config(tmp_path, model, store=StoreConfig(full_disk_seconds=0.01)), patch)
    told = capsys.readouterr()
    assert (told.out + told.err).count("the run waits for up to 0.01 s") == 1
    again = FleetOfGroups()
    run(ppo_config(tmp_path, model), monkeypatch, again)
    assert again.taken == [2, 3, 4, 5, 6, 7], "its first step was lost"


def test_a_run_whose_store_is_removed_does_not_say_that_everything_is_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ppo_config(tmp_path, model, saver=SaverConfig(freq_steps=None))

    class CarelessUser(FleetOfGroups):
        def take(self, count: int) -> list[GroupResult]:
            if len(self.taken) == 2 * count:
                (tmp_path / "test/one" / STORE_FILE).unlink()
            return super().take(count)

    with pytest.raises(StoreGone):
        run(config, monkeypatch, CarelessUser())
    assert "saved" not in capsys.readouterr().err


def test_the_size_of_the_store_is_that_of_its_file_after_the_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = run(ppo_config(tmp_path, model), monkeypatch).summary
    size = (tmp_path / "test/one/run.db").stat().st_size
    assert summary["store_bytes"] == summary["store"]["bytes"]
    assert summary["store_bytes_per_token"] == summary["store_bytes"] / summary["trained"]["tokens"]
    assert abs(summary["store_bytes"] - size) < 0.1 * size, "the last checkpoint is written down after the summary"


def test_a_run_with_a_kl_penalty_has_a_reference_without_a_gradient(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[ScoringEngine] = []
    open_reference = learners.open_reference

    def watched(config: PPOConfig, engine: Learner) -> LogProbs | None:
        reference = open_reference(config, engine)
        assert isinstance(reference, ScoringEngine)
        opened.append(reference)
        return reference

    monkeypatch.setattr(learners, "open_reference", watched)
    config = ppo_config(tmp_path, model, ref=ReferenceConfig(path=str(model)))
    config.actor.kl_ctl = 0.1
    config.actor.optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0)
    run(config, monkeypatch)
    (reference,) = opened
    assert reference.model.flat_grad is None
    assert not reference.flat.requires_grad
    fresh = open_trainable(model).flat
    assert torch.equal(reference.flat, fresh.detach())
    penalties = [row["kl"] for row in read_metrics(tmp_path / "test/one")]
    assert penalties[0] == pytest.approx(0.0, abs=1e-6)
    assert all(penalty > 1e-6 for penalty in penalties[1:])


@pytest.mark.parametrize("backend", ["embedded", "vllm"])
def test_only_engines_of_others_get_canaries_and_those_are_the_trainers_logprobs(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    fleet, canaries = FleetOfGroups(), []
    monkeypatch.setattr(fleet, "publish", lambda update: canaries.append(update.canary))
    run(ppo_config(tmp_path, model, rollout=RolloutConfig(backend=backend)), monkeypatch, fleet)
    assert len(canaries) == 5
    if backend == "embedded":
        assert set(canaries) == {None}
        return
    first, *_, last = canaries
    assert (list(first.earlier), list(last.earlier)) == ([], [0, 3])
    assert last.earlier == {0: first.logprobs, 3: canaries[3].logprobs}
    span = Span(np.array(last.tokens), np.arange(1, len(last.tokens)), group=0)
    trained = ScoringEngine(open_trainable(tmp_path / "test/one/checkpoints/step-000004"))
    expected = trained.logprobs(TokenBatch([span], torch.ones(len(span.asked))))
    torch.testing.assert_close(torch.tensor(last.logprobs), expected)
    assert last.logprobs != canaries[3].logprobs


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def interrupted_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, step: int = 3) -> Path:
    """A run that ended after `step` steps with a checkpoint of each; returns its directory."""
    with pytest.raises(EngineError):
        run(ppo_config(tmp_path, model), monkeypatch, FleetOfGroups(fails_at=step))
    return tmp_path / "test/one"


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("model.safetensors", truncate),
    ("model.safetensors", flip_a_byte),
    ("trainer.pt", truncate),
    ("trainer.pt", flip_a_byte),
    ("tokenizer.json", Path.unlink),
    ("config.json", Path.unlink),
    ("manifest.json", truncate),
    ("manifest.json", flip_a_byte),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    damage: Callable[[Path], None],
) -> None:
    run_dir = interrupted_run(tmp_path, model, monkeypatch)
    newest = run_dir / "checkpoints/step-000003"
    damage(newest / name)
    capfd.readouterr()
    result = run(ppo_config(tmp_path, model), monkeypatch)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if " damaged" in line]
    assert line.startswith("the checkpoint step-000003 is damaged (")
    assert name in line or name == "manifest.json"  # one that was changed accuses a file that is fine
    assert line.endswith("and kept as damaged-step-000003; step-000002 is used instead")
    assert steps_in(run_dir / "metrics.jsonl") == [1, 2, 3, 4]
    assert result.model_dir.name == "step-000004"
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["damaged-step-000003", *(f"step-00000{step}" for step in (1, 2, 3, 4))]


def test_checkpoints_without_a_manifest_are_loaded_if_they_can_be_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = interrupted_run(tmp_path, model, monkeypatch)
    for manifest in run_dir.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    truncate(run_dir / "checkpoints/step-000003/trainer.pt")
    run(ppo_config(tmp_path, model), monkeypatch)
    printed = capfd.readouterr().err
    assert "the checkpoint step-000003 is damaged (it cannot be read: " in printed
    assert "step-000002 is used instead" in printed
    assert "(resuming after step 3)" in printed


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = interrupted_run(tmp_path, model, monkeypatch)
    for state in run_dir.glob("checkpoints/*/trainer.pt"):
        truncate(state)
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(ArealError, match=r"^no checkpoint in .* is intact .*choose another trial_name to start over$"):
        run(ppo_config(tmp_path, model), monkeypatch)
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 3


def test_stray_names_beside_checkpoints_are_ignored(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = interrupted_run(tmp_path, model, monkeypatch)
    for name in ("step-zzz", "step-000002.bak", "step-", "step-9", "notes", ".step-000009.partial"):
        (run_dir / "checkpoints" / name).mkdir()
    (run_dir / "checkpoints/step-000009").write_text("a file")
    fleet = FleetOfGroups()
    run(ppo_config(tmp_path, model), monkeypatch, fleet)
    assert fleet.taken == [6, 7]
    assert (run_dir / "checkpoints/step-zzz").is_dir()


@pytest.mark.parametrize("left", ["nothing", "the empty directory"])
def test_a_run_whose_checkpoints_are_gone_is_refused_and_keeps_its_record(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    run_dir = interrupted_run(tmp_path, model, monkeypatch)
    shutil.rmtree(run_dir / "checkpoints")
    if left != "nothing":
        (run_dir / "checkpoints").mkdir()
    before = (run_dir / "metrics.jsonl").read_bytes()
    for _ in range(2):  # refusing must not leave anything that makes the next attempt start over
        with pytest.raises(RunExists, match=r"has a record of its steps but no checkpoint .*choose another trial_name"):
            run(ppo_config(tmp_path, model), monkeypatch)
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_run_that_ended_before_its_first_checkpoint_starts_at_the_beginning(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Like the end of a process: nothing is saved."""

    class KilledFleet(FleetOfGroups):
        def take(self, count: int) -> list[GroupResult]:
            if self.taken:
                raise Killed
            return super().take(count)

    config = ppo_config(tmp_path, model, saver=SaverConfig(freq_steps=None))
    with pytest.raises(Killed):
        run(config, monkeypatch, KilledFleet())
    assert steps_in(tmp_path / "test/one/metrics.jsonl") == [1]
    run(config, monkeypatch)
    assert steps_in(tmp_path / "test/one/metrics.jsonl") == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_damaged_lines_of_a_record_are_dropped_and_counted(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    run_dir = interrupted_run(tmp_path, model, monkeypatch)
    good = (run_dir / name).read_bytes().splitlines(keepends=True)
    bad = [b"not json\n", b"\0\0\0\n", b"[1, 2]\n", b'{"reward": 1}\n', b'{"step": "two"}\n', b"\xff\xfe\n", b"\n"]
    (run_dir / name).write_bytes(b"".join([good[0], *bad, *good[1:], b'{"step": 3, "rew']))
    run(ppo_config(tmp_path, model), monkeypatch)
    lines = [line for line in caplog.messages if " damaged" in line]
    assert len(lines) == 1, lines
    assert lines[0].endswith(f"{name} has 7 damaged lines, which are dropped")
    assert (run_dir / name).read_bytes().startswith(b"".join(good))
    assert sorted(set(steps_in(run_dir / name))) == [1, 2, 3, 4]


CHANGES: list[tuple[str, dict[str, Any], Sequence[dict[str, Any]], str]] = [
    ("seed", {"seed": 2}, TASKS, "seed was 1, is 2"),
    (
        "shuffle",
        {"train_dataset": DatasetConfig(batch_size=2, shuffle=False)},
        TASKS,
        "train_dataset.shuffle was True, is False",
    ),
    (
        "batch size",
        {"train_dataset": DatasetConfig(batch_size=1)},
        TASKS,
        "train_dataset.batch_size was 2, is 1",
    ),
    (
        "samples",
        {"gconfig": GenerationHyperparameters(n_samples=8)},
        TASKS,
        "gconfig.n_samples was 4, is 8",
    ),
    ("fewer tasks", {}, TASKS[:-1], r"train_dataset was 40 tasks \(\w+\), is 39 tasks \(\w+\)"),
    ("another task", {}, [*TASKS[:-1], {"question": "?"}], r"train_dataset was 40 tasks \(\w+\), is 40 tasks \(\w+\)"),
]


@pytest.mark.parametrize(("changed", "tasks", "complaint"), [each[1:] for each in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_run_is_not_resumed_with_what_would_change_the_order_of_its_tasks(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    tasks: Sequence[dict[str, Any]],
    complaint: str,
) -> None:
    run_dir = interrupted_run(tmp_path, model, monkeypatch)
    settings, record = (run_dir / "config.yaml").read_bytes(), (run_dir / "metrics.jsonl").read_bytes()
    config = ppo_config(tmp_path, model, **changed)
    with pytest.raises(RunExists, match=rf"{complaint}; .*recover\.mode=force") as refused:
        run(config, monkeypatch, tasks=tasks)
    assert str(refused.value).count(" was ") == 1
    assert (run_dir / "config.yaml").read_bytes() == settings
    assert (run_dir / "metrics.jsonl").read_bytes() == record
    run(replace(config, recover=RecoverConfig(mode="force")), monkeypatch, tasks=tasks)
    assert steps_in(run_dir / "metrics.jsonl") == [1, 2, 3, 4]
    assert (run_dir / "config.yaml").read_bytes() != settings


def test_the_same_settings_and_tasks_go_on_whatever_else_has_changed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_run(tmp_path, model, monkeypatch)
    config = ppo_config(tmp_path, model, total_train_steps=5)
    assert run(config, monkeypatch, tasks=[dict(task) for task in TASKS]).summary["steps"] == 5


def test_a_checkpoint_that_does_not_know_its_settings_is_resumed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = interrupted_run(tmp_path, model, monkeypatch)
    newest = run_dir / "checkpoints/step-000003"
    saved = torch.load(newest / "trainer.pt", weights_only=True)
    del saved["trainer"]["fingerprint"]
    torch.save(saved, newest / "trainer.pt")
    (newest / "manifest.json").unlink()
    fleet = FleetOfGroups()
    run(ppo_config(tmp_path, model, seed=2), monkeypatch, fleet)
    assert fleet.taken == [6, 7]


def test_every_held_out_task_is_sampled_as_often_as_asked_and_once_greedily(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, int]] = []

    def evaluate(tasks: Sequence[dict[str, Any]], *, greedy: bool) -> list[GroupResult]:
        """Of each task the first sample fails, and of the second task every one."""
        asked.append((greedy, len(tasks)))
        seen: Counter[str] = Counter()
        results = []
        for number, task in enumerate(tasks):
            right = task["question"] != "1" and seen[task["question"]] > 0
            results.append(make_group(number, [float(right)]))
            seen[task["question"]] += 1
        return results

    config = ppo_config(tmp_path, model, evaluator=EvaluatorConfig(n_samples=4))
    summary = run(config, monkeypatch, FleetOfGroups(evaluate=evaluate), valid=TASKS[:3]).summary
    assert asked == [(False, 12), (True, 3)] * 2
    after = summary["held_out"]["after"]
    assert (after["reward"], after["tasks"], after["episodes"]) == (0.5, 3, 12)
    assert after["pass_at_k"] == pytest.approx([0.5, 2 / 3, 2 / 3, 2 / 3])
    assert summary["held_out"]["after_greedy"]["reward"] == 0.0


class KeepingFleet(FleetOfGroups):
    """Remembers which groups it is to keep."""

    keep: Callable[[GroupResult], bool]

    def begin(
        self,
        tasks: Iterator[tuple[int, dict[str, Any]]],
        admission: Admission,
        keep: Any,
        record: GroupRecord,
        ready: Sequence[GroupResult],
    ) -> None:
        super().begin(tasks, admission, keep, record, ready)
        self.keep = keep


@pytest.mark.parametrize(("algorithm", "kept"), [("dapo", False), ("grpo", True)])
def test_groups_of_equal_rewards_are_dropped_where_the_algorithm_says_so(
    algorithm: str, kept: bool, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, fleet = ppo_config(tmp_path, model), KeepingFleet()
    config.actor.algorithm = algorithm
    run(config, monkeypatch, fleet)
    assert fleet.keep(make_group(0, [0, 1]))
    assert fleet.keep(make_group(0, [1, 1])) == kept


def test_what_was_computed_is_written_down_with_where_it_comes_from(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ppo_config(tmp_path, model)
    config.actor.algorithm, config.actor.eps_clip_higher = "dapo", 0.3
    result = run(config, monkeypatch)
    actor = yaml.safe_load((tmp_path / "test/one/config.yaml").read_text())["actor"]
    assert (actor["algorithm"], actor["eps_clip_higher"], actor["overlong_share"]) == ("dapo", 0.3, 0.2)
    assert "preset" not in actor.values()
    with StoreReader(result.run_dir) as reader:
        stored = reader.meta()["algorithm"]
    lines = {each["name"]: each for each in stored["settings"]}
    assert stored["name"] == "dapo"
    assert (lines["eps_clip_higher"]["origin"], lines["eps_clip_higher"]["instead_of"]) == ("you", "0.28")
    assert lines["overlong_share"]["origin"] == "preset"
