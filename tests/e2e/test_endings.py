"""However a run ends, it says why, leaves no process running, and loses nothing that it had saved."""

import os
import re
import signal
from pathlib import Path

import pytest
from real_runs import CONFIG, END_SECONDS, Start, Witness, rows_of, summary_of

from areal.cli.main import main
from areal.infra.rpc.shipping import SCRATCH_VARIABLE

PROCESSES = pytest.mark.parametrize(
    ("module", "name"), [("areal.engine.inference.server", "engine"), ("areal.rollout.worker", "rollout worker 0")]
)


@PROCESSES
def test_killed_process_ends_the_run_which_says_what_died(example: Start, module: str, name: str) -> None:
    run = example("total_train_steps=200", "scheduler.max_restarts=0")
    run.wait_for(r"^step 10/200 ")
    victim = run.only(module)
    witness = Witness(run.descendants())
    os.kill(victim, signal.SIGKILL)
    assert run.wait(END_SECONDS) == 2, run.text
    assert run.lines[-1].startswith(f"areal: {name} (pid {victim}) was killed by signal 9 (SIGKILL)")
    assert witness.survivors(END_SECONDS) == {}
    assert re.search(r"^stopped after step \d+ of 200; everything is saved in ", run.text, re.MULTILINE)


@PROCESSES
def test_frozen_process_is_named_and_the_run_saves(example: Start, run_dir: Path, module: str, name: str) -> None:
    run = example("total_train_steps=200", "scheduler.heartbeat_seconds=3", "scheduler.max_restarts=0")
    run.wait_for(r"^step 10/200 ")
    victim = run.only(module)
    witness = Witness(run.descendants())
    os.kill(victim, signal.SIGSTOP)
    assert run.wait(3 + END_SECONDS) == 2, run.text
    assert run.lines[-1].startswith(f"areal: {name} (pid {victim}) was frozen (no sign of life for 3 s;"), run.text
    assert "Traceback" not in run.text
    assert witness.survivors(END_SECONDS) == {}
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 1


@PROCESSES
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_process_that_dies_or_freezes_is_replaced_and_its_groups_run_again(
    example: Start, run_dir: Path, module: str, name: str, sign: signal.Signals
) -> None:
    # Synchronous, so that a group cannot grow stale while it waits for the replacement.
    run = example("total_train_steps=40", "scheduler.heartbeat_seconds=3", "rollout.max_head_offpolicyness=0")
    run.wait_for(r"^step 10/40 ")
    victim = run.only(module)
    os.kill(victim, sign)
    assert run.wait() == 0, run.text
    how = "was killed by signal 9" if sign == signal.SIGKILL else "was frozen"
    assert f"{name} (pid {victim}) {how}" in run.text
    assert "it is started again" in run.text
    assert "Traceback" not in run.text
    metrics = rows_of(run_dir / "metrics.jsonl")
    assert [row["step"] for row in metrics if "reward" in row] == list(range(1, 41))
    tasks = [row["task_id"] for row in rows_of(run_dir / "rollouts.jsonl")]
    assert {tasks.count(task) for task in tasks} == {4}, "a group was trained twice, or in part"
    assert summary_of(run_dir)["rejections"] == {}


@PROCESSES
def test_process_that_dies_while_the_run_starts_is_started_again(
    example: Start, run_dir: Path, module: str, name: str
) -> None:
    run = example("total_train_steps=2")
    victim = run.wait_for_process(module)
    os.kill(victim, signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert f"{name} (pid {victim}) was killed by signal 9 (SIGKILL); it is started again" in run.text
    assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl") if "reward" in row] == [1, 2]


def test_one_of_two_engines_dies_and_no_episode_is_lost(example: Start, run_dir: Path) -> None:
    run = example("total_train_steps=30", "rollout.backend=embedded:d2")
    run.wait_for(r"^step 5/30 ")
    victim = next(pid for pid, command in run.descendants().items() if "--index 1" in command)
    os.kill(victim, signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert f"engine 1 (pid {victim}) was killed by signal 9" in run.text
    assert "Traceback" not in run.text
    summary = summary_of(run_dir)
    assert set(summary["rejections"]) <= {"stale"}
    assert {"engine 0", "engine 1"} <= set(summary["cpu_seconds"])
    tasks = [row["task_id"] for row in rows_of(run_dir / "rollouts.jsonl")]
    assert {tasks.count(task) for task in tasks} == {4}, "a group was trained twice, or in part"


EXITING = """
import os
from pathlib import Path
from areal.workflow.openai.math_agent import MathAgent


class Exiting(MathAgent):
    async def run(self, data, **extra_kwargs):
        reward = await super().run(data, **extra_kwargs)
        exits = Path("exits")
        if len(list(exits.iterdir())) < int(os.environ["EXITS"]):
            (exits / str(os.getpid())).touch()
            os._exit(7)
        return reward
"""


@pytest.mark.parametrize("exits", [1, 9])
def test_agent_that_ends_its_worker_costs_the_episodes_there_and_in_the_end_the_run(
    example: Start, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: int
) -> None:
    (tmp_path / "exiting.py").write_text(EXITING)
    (tmp_path / "exits").mkdir()
    monkeypatch.setenv("EXITS", str(exits))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = example("total_train_steps=3", "workflow=exiting.Exiting", "rollout.max_head_offpolicyness=0")
    code = run.wait()
    if exits == 1:
        assert code == 0, run.text
        assert len(rows_of(run_dir / "rollouts.jsonl")) == 3 * 4 * 4
        assert summary_of(run_dir)["rejections"] == {}
    else:
        assert code == 2, run.text
        assert len(list((tmp_path / "exits").iterdir())) == 4
        assert "exited with code 7" in run.lines[-1]
        assert "3 restarts within an hour are as many as scheduler.max_restarts allows" in run.lines[-1]
        assert "rollout.agent.mode=subproc" in run.lines[-1]


def test_sigterm_saves_and_leaves_no_process(example: Start, run_dir: Path) -> None:
    run = example("total_train_steps=200")
    run.wait_for(r"^step 10/200 ")
    witness = Witness(run.descendants())
    run.kill(signal.SIGTERM)
    assert run.wait(END_SECONDS) == 128 + signal.SIGTERM, run.text
    assert witness.survivors(END_SECONDS) == {}
    stopped = run.wait_for(r"^stopped after step \d+ of 200; everything is saved in ")
    assert [each.name for each in (run_dir / "checkpoints").glob("step-*")] == [f"step-{int(stopped.split()[3]):06d}"]


def test_killed_driver_takes_every_process_and_file_with_it(example: Start) -> None:
    run = example("total_train_steps=200")
    run.wait_for(r"^step 10/200 ")
    descendants = run.descendants()
    shared = {Path(path) for path in re.findall(r"/dev/shm/areal-\S+", Path(f"/proc/{run.pid}/maps").read_text())}
    assert shared
    assert all(path.exists() for path in shared)
    scratch = {Path(value) for pid in descendants if (value := _variable(pid, SCRATCH_VARIABLE))}
    assert len(scratch) == 2  # the engine's and the worker's
    assert all(path.is_dir() for path in scratch)
    assert sum("areal." in command for command in descendants.values()) >= 2
    witness = Witness(descendants)
    run.kill(signal.SIGKILL)
    run.wait(END_SECONDS)
    assert witness.survivors(END_SECONDS) == {}
    assert [path for path in shared if path.parent.exists()] == []
    assert [path for path in scratch if path.exists()] == []


def _variable(pid: int, name: str) -> str:
    """Of a process's environment; empty = it has none of that name."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(each.partition("=")[::2] for each in variables).get(name, "")


def test_ctrl_c_saves_and_the_same_command_goes_on_to_the_end(example: Start, run_dir: Path) -> None:
    settings = ["total_train_steps=40", "train_dataset.batch_size=8"]
    run = example(*settings)
    run.wait_for(r"^step 4/40 ")
    witness = Witness(run.descendants())
    run.kill(signal.SIGINT)
    assert run.wait(END_SECONDS) == 130, run.text
    assert witness.survivors(END_SECONDS) == {}
    stopped = run.wait_for(r"^stopped after step \d+ of 40; everything is saved in runs/sort-digits/one$")
    step = int(stopped.split()[3])
    assert "to go on, give the same command with trial_name=one" in run.lines
    assert run.lines[-1] == "areal: interrupted"
    assert [each.name for each in (run_dir / "checkpoints").iterdir()] == [f"step-{step:06d}"]

    again = example(*settings)
    assert again.wait() == 0, again.text
    assert f"(resuming after step {step})" in again.text
    metrics = rows_of(run_dir / "metrics.jsonl")
    assert [row["step"] for row in metrics if "reward" in row] == list(range(1, 41))
    # What the run is compared with was measured once, before the first step.
    assert [row["step"] for row in metrics if "eval_reward" in row] == [0, 40]
    tasks = [row["task_id"] for row in rows_of(run_dir / "rollouts.jsonl")]
    assert {tasks.count(task) for task in tasks} == {4}, "a task was trained twice"
    assert "verdict" in summary_of(run_dir)

    finished = example(*settings)
    assert finished.wait() == 2
    assert finished.lines[1:] == [
        "areal: the run sort-digits/one is finished and is not overwritten (runs/sort-digits/one); "
        "choose another trial_name"
    ]


def test_unknown_key_is_one_line_and_code_2(example: Start) -> None:
    run = example("actor.pth=x")
    assert run.wait() == 2, run.text
    assert len(run.lines) == 1, run.text
    assert re.search(r"^areal: .*actor\.pth.*path", run.lines[0])


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("actor.path=./no-such-model", r"^areal: no model directory at './no-such-model'"),
        ("actor.path=builtin:tiny-maths", r"^areal: no built-in model 'tiny-maths'; use one of tiny-math"),
        ("workflow=no_such_module.Agent", r"^areal: workflow 'no_such_module.Agent' cannot be imported: "),
        ("workflow=areal.workflow.openai.math_agent.Agent", r"^areal: workflow .* has no Agent; it has .*MathAgent"),
        ("train_dataset.path=no-such.jsonl", r"^areal: cannot read tasks from 'no-such.jsonl'"),
        ("output_dir=/dev/null/runs", r"^areal: cannot write to /dev/null/runs/sort-digits/one: Not a directory;"),
    ],
)
def test_mistake_of_the_user_is_one_line_and_code_2(
    setting: str, complaint: str, tmp_path: Path, tiny_math: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--config", str(CONFIG), f"output_dir={tmp_path}", "trial_name=one", setting]
    assert main(words) == 2
    said, *printed = capfd.readouterr().err.splitlines()
    assert said.startswith("areal 0."), "what is about to run comes first, before anything is looked at"
    assert len(printed) == 1, printed
    assert re.search(complaint, printed[0])


@pytest.mark.parametrize(("setting", "who"), [("rollout.gpus=1000", "engine"), ("actor.gpus=1000", "trainer")])
def test_run_that_asks_for_more_than_there_is_ends_with_what_is_free(
    setting: str, who: str, tmp_path: Path, tiny_math: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--config", str(CONFIG), f"output_dir={tmp_path}", "trial_name=one", setting]
    assert main(words) == 2
    printed = capfd.readouterr().err.splitlines()
    assert re.search(
        rf"^areal: {who} must fit this machine, but needs 1000 GPUs, \d+ are free; ask for less", printed[-1]
    )
    assert not [line for line in printed if "Traceback" in line]
