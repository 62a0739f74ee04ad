"""Environments of the real verifiers library through the real proxy: their tasks, their rewards, our tokens."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import DatasetError, WorkflowError
from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.workflow.verifiers import VerifiersWorkflow

vf = pytest.importorskip("verifiers.v1")
pytestmark = pytest.mark.slow  # the library takes seconds to load

ENVIRONMENT = "verifiers:sort-digits?size=60"


@pytest.fixture(autouse=True)
def example_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "verifiers_environment"))


def tasks(path: str = ENVIRONMENT, split: str = "train", **settings: Any) -> list[dict[str, Any]]:
    return get_custom_dataset(split, DatasetConfig(path=path, **settings))


def test_splits_share_no_task_and_tasks_carry_their_data() -> None:
    found = {split: [task["task"]["prompt"] for task in tasks(split=split)] for split in ("train", "valid", "test")}
    assert sum(map(len, found.values())) == 60
    assert len(set().union(*found.values())) == 60
    first = tasks(size=1)[0]
    assert first["messages"] == [{"role": "user", "content": first["task"]["prompt"]}]
    assert first["environment"] == {"taskset": {"id": "sort-digits", "size": 60}}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("verifiers:nowhere-to-be-found", "cannot load verifiers:nowhere-to-be-found"),
        ("verifiers:sort-digits?colour=red", "colour"),
        ("verifiers:sort-digits?size", "settings must read as in verifiers:ID"),
    ],
)
def test_what_is_no_taskset_is_refused(path: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        tasks(path)


def test_more_tasks_than_there_are_is_refused() -> None:
    with pytest.raises(DatasetError, match=r"has \d+ different train tasks, asked for 1000"):
        tasks(size=1000)


ODD_TASKSET = """
import itertools
import verifiers.v1 as vf

class OddTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        {load}

__all__ = ["OddTaskset"]
"""
FEW = "return (vf.Task(vf.TaskData(idx=0, prompt=f'Do {number % 30}')) for number in itertools.count())"


@pytest.mark.parametrize(
    ("name", "load", "message"),
    [
        ("few_tasks", FEW, r"has \d+ different train tasks, asked for 100; ask for fewer"),
        ("no_tasks", "raise KeyError('prompt')", "cannot load the tasks of verifiers:no_tasks: 'prompt'"),
    ],
)
def test_a_taskset_that_repeats_itself_or_fails_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, load: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(ODD_TASKSET.format(load=load))
    with pytest.raises(DatasetError, match=message):
        tasks(f"verifiers:{name}", size=100)


@pytest.mark.parametrize("route", ["in process", "over TCP"])
@pytest.mark.parametrize(("says", "reward"), [("right", 1.0), ("nothing at all", 0.0)])
async def test_the_rubrics_reward_is_the_reward_and_tokens_are_the_sampled_ones(
    stage: Any, route: str, says: str, reward: float
) -> None:
    task = tasks(size=1)[0]
    async with stage(lambda prompt: task["task"]["answer"] if says == "right" else says) as s:
        assert await VerifiersWorkflow().run(task, **s.kwargs(route)) == reward
        s.check_tokens()
        s.check_one_conversation(1)


async def test_an_environment_is_imported_beside_the_event_loop(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    example = Path(__file__).parents[2] / "examples" / "verifiers_environment" / "sort_digits.py"
    seen = "import threading\nIN_LOOP = threading.current_thread() is threading.main_thread()\n"
    (tmp_path / "slow_to_import.py").write_text(f"{example.read_text()}\n{seen}")
    task = tasks(size=1)[0] | {"environment": {"taskset": {"id": "slow-to-import"}}}
    async with stage(lambda prompt: task["task"]["answer"]) as s:
        assert await VerifiersWorkflow().run(task, **s.kwargs()) == 1.0
    assert not import_module("slow_to_import").IN_LOOP


@pytest.mark.parametrize("kind", ["id", "config", "object"])
async def test_the_environment_may_be_the_workflows(stage: Any, kind: str) -> None:
    config = {"taskset": {"id": "sort-digits"}}
    env = {"id": "sort-digits", "config": config, "object": None}[kind]
    if kind == "object":
        env = vf.load_environment(vf.resolve_env_config(config))
    task = {"task": tasks(size=1)[0]["task"]}
    async with stage(lambda prompt: task["task"]["answer"]) as s:
        assert await VerifiersWorkflow(env).run(task, **s.kwargs()) == 1.0


async def test_what_the_model_is_refused_ends_the_episode_with_the_reason(stage: Any) -> None:
    task = tasks(size=1)[0]
    async with stage(lambda prompt: "1") as s:
        await s.proxy.end_session(s.session)
        with pytest.raises(WorkflowError, match="the verifiers environment 'sort-digits' failed"):
            await VerifiersWorkflow().run(task, **s.kwargs())


@pytest.mark.parametrize(
    ("env", "data", "message"),
    [
        (None, {}, "there is no environment"),
        ("sort-digits", {}, "needs a task with `task`"),
        ("sort-digits", {"task": {"answer": 3}}, "`task` must be the data of a NumberTask"),
        ("nowhere-to-be-found", {}, "verifiers cannot read the environment|cannot make the environment"),
    ],
)
async def test_what_cannot_be_played_is_refused(stage: Any, env: Any, data: dict[str, Any], message: str) -> None:
    async with stage(lambda prompt: "1") as s:
        with pytest.raises(WorkflowError, match=message):
            await VerifiersWorkflow(env).run(data, **s.kwargs())


PLAIN = """
import verifiers.v1 as vf
__all__ = ["Plain"]
class Plain(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="Hello"), self.config.task)
"""


def test_what_is_left_open_runs_on_this_machine_and_gives_the_model_no_shell(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "plain_taskset.py").write_text(PLAIN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    left_open = VerifiersWorkflow("plain-taskset")._config.agent
    assert (left_open.runtime.type, left_open.harness.id) == ("subprocess", "null")
    chosen = {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}
    agent = VerifiersWorkflow({"taskset": {"id": "plain-taskset"}, "agent": chosen})._config.agent
    assert (agent.runtime.type, agent.harness.id) == ("docker", "bash")
    assert VerifiersWorkflow("sort-digits")._config.agent.harness is None
