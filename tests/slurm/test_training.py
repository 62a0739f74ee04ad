"""A run over two hosts of a real Slurm cluster that share neither loopback, shared memory nor /tmp."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_driver import AGENT, CONFIG, RUN_SECONDS, SMALL
from slurm_driver import ON_SLURM, Driver

from benchmarks.clusters import Hosts, SlurmCluster, until

REWARDS = """
SCORE = 0.5

def half(prompt, completion, prompt_ids, completion_ids, answer, **data):
    return SCORE if completion.strip() == answer else 0.0
"""
OWN_REWARD = """
import own_rewards
class Judge:
    def __init__(self, score):
        self.score = score
    def __call__(self, prompt, completion, prompt_ids, completion_ids, **data):
        return 0.5 * self.score(prompt, completion, prompt_ids, completion_ids, **data)
def made(by):
    def quarter(*args, **kwargs):
        return by(*args, **kwargs)
    return quarter
"""
pytestmark = pytest.mark.timeout(2 * RUN_SECONDS)


@pytest.fixture
def model(tiny_math: Path, tmp_path: Path) -> Path:
    """The built-in model in a directory that the hosts do not see."""
    return Path(shutil.copytree(tiny_math, tmp_path / "model"))


def test_an_agent_trains_across_two_hosts_that_have_neither_the_model_nor_its_module(
    cluster: SlurmCluster, hosts: Hosts, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "own_agents.py").write_text(AGENT)
    driver = Driver(
        cluster,
        tmp_path,
        f"actor.path={model}",
        "workflow=own_agents.OwnAgent",
        "total_train_steps=5",
        "actor.kl_ctl=1e-4",
        f"ref.path={model}",
        "rollout.backend=embedded:d2",
    )
    assert driver.wait() == 0, driver.text
    steps = driver.steps()
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    rollouts = driver.rollouts()
    assert len(rollouts) == 5 * 4 * 4
    assert {row["reward"] for row in rollouts} == {0.0, 1.0}
    difference = driver.read("summary.json")["max_logprob_difference"]
    assert 0 < difference < 1e-4, "the trainer computes what the engines on other hosts sampled"
    assert max(row["version_max"] for row in rollouts) > 0, "new weights reached the engines"
    until(lambda: not _of_the_run(hosts), 5, "hosts without processes of the run")


@pytest.mark.parametrize(
    ("setting", "arguments", "rewards"),
    [
        ("reward_fn=own_rewards.half", "", {0.0, 0.5}),  # an import string in the config
        ("", "'reward_fn': made(Judge(own_rewards.half))", {0.0, 0.25}),  # a local function, around objects of __main__
    ],
)
def test_a_reward_function_that_no_other_host_has_travels_by_value(
    cluster: SlurmCluster, model: Path, tmp_path: Path, setting: str, arguments: str, rewards: set[float]
) -> None:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    driver = Driver(
        cluster,
        tmp_path,
        f"actor.path={model}",
        "workflow=areal.workflow.RLVRWorkflow",
        "total_train_steps=2",
        *filter(None, [setting]),
        definitions=OWN_REWARD,
        arguments=arguments,
    )
    assert driver.wait() == 0, driver.text
    assert {row["reward"] for row in driver.rollouts()} == rewards


def test_a_killed_worker_on_another_host_costs_no_group(
    cluster: SlurmCluster, hosts: Hosts, model: Path, tmp_path: Path
) -> None:
    driver = Driver(cluster, tmp_path, f"actor.path={model}", "total_train_steps=12", "rollout.num_workers=2")
    driver.until_step(2)
    victims = [pid for pid in _of_the_run(hosts) if "areal.rollout.worker" in _command(pid)]
    assert len(victims) == 2, driver.text
    os.kill(victims[0], signal.SIGKILL)
    assert driver.wait() == 0, driver.text
    assert "was killed by signal 9" in driver.text
    assert [row["step"] for row in driver.steps()] == list(range(1, 13))
    tasks = [row["task_id"] for row in driver.rollouts()]
    assert len(tasks) == 12 * 4 * 4
    assert all(tasks.count(task) == 4 for task in set(tasks)), "each group is trained once"


def test_kill_9_of_the_driver_leaves_nothing_anywhere(
    cluster: SlurmCluster, hosts: Hosts, model: Path, tmp_path: Path
) -> None:
    driver = Driver(cluster, tmp_path, f"actor.path={model}", "total_train_steps=500")
    driver.until_step(2)
    assert _of_the_run(hosts)
    driver.process.send_signal(signal.SIGKILL)
    driver.process.wait(10)
    began = time.monotonic()
    until(lambda: not _of_the_run(hosts), 10, "hosts without processes of the run")
    took = time.monotonic() - began
    assert took < 3, f"it took {took:.1f} s"
    until(lambda: not cluster.run("squeue", "-h").strip(), 5, "empty queue")


def test_a_pulled_cable_is_noticed_and_the_run_goes_on(
    cluster: SlurmCluster, hosts: Hosts, model: Path, tmp_path: Path
) -> None:
    driver = Driver(
        cluster,
        tmp_path,
        f"actor.path={model}",
        "total_train_steps=500",
        "rollout.backend=embedded:d2",
        "rollout.num_workers=2",
    )
    driver.until_step(2)
    try:
        hosts.pull_cable("h2")
        began = time.monotonic()
        until(lambda: "was lost with its keeper" in driver.text, 30, "a line that says which process was lost")
        assert time.monotonic() - began < 15, "noticed within ten seconds, and written down"
    finally:
        hosts.plug_cable("h2")
        driver.process.terminate()
        driver.process.wait(60)
    until(lambda: not _of_the_run(hosts), 30, "hosts without processes of the run")


def test_an_impossible_placement_ends_the_run_with_its_reason(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    driver = Driver(cluster, tmp_path, f"actor.path={model}", "rollout.gpus=8", "scheduler.place_seconds=5")
    assert driver.wait() != 0
    assert "Slurm gave no place for engine (8 gpus)" in driver.text
    assert "h1 idle" in driver.text


def test_areal_train_submits_itself_and_follows_the_log(cluster: SlurmCluster, tiny_math: Path) -> None:
    shared = cluster.config.parent / "submitted"
    model = shutil.copytree(tiny_math, cluster.config.parent / "model")
    argv = [
        "train",
        "--config",
        str(CONFIG),
        *SMALL,
        *ON_SLURM,
        f"actor.path={model}",
        f"output_dir={shared}",
        "total_train_steps=5",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "areal.cli.main", *argv],
        env={**os.environ, **cluster.env},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "submitted as Slurm job" in done.stdout
    assert "step 5/5" in done.stdout
    assert (shared / "sort/one/summary.json").exists()


def _of_the_run(hosts: Hosts) -> set[int]:
    """The processes of runs on all hosts."""
    return {pid for name in hosts.names for pid in hosts.processes(name) if "python" in _command(pid)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
