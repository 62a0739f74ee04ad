"""Registered names, the experiment's settings, and the command's arguments."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import realhf
from areal.api.errors import ConfigError, WorkflowError
from areal.config.experiment import DatasetConfig
from areal.config.loader import load_expr_config
from areal.dataset import get_custom_dataset
from realhf.api.core import agent, agent_api
from realhf.api.core.agent_api import (
    AGENTS,
    ENVIRONMENTS,
    Agent,
    constructor_arguments,
    question_id,
    register_agent,
    register_environment,
)
from realhf.experiments.async_exp.async_math_ppo import AsyncPPOMATHConfig, AsyncRLExperimentConfig, PPOMATHConfig
from realhf.impl.agent.math_multi_turn_agent import MathMultiTurnAgent
from realhf.impl.environment.math_code_single_step_env import MathCodeSingleStepEnv
from realhf.training.main_async_ppo import main

PACKAGE = Path(realhf.__file__).parent

PROMISED = {
    "realhf.api.core.agent": [
        "Agent",
        "AgentAbstraction",
        "BundledGenerationOutputs",
        "EnvServiceAbstraction",
        "EnvironmentService",
        "SequenceSample",
        "register_agent",
        "register_environment",
    ],
    "realhf.impl.agent.math_multi_turn_agent": ["MathMultiTurnAgent"],
    "realhf.impl.environment.math_code_single_step_env": ["MathCodeSingleStepEnv"],
    "realhf.experiments.async_exp.async_math_ppo": ["AsyncPPOMATHConfig", "AsyncRLExperimentConfig", "PPOMATHConfig"],
    "realhf.experiments.async_exp.async_ppo_math_exp": ["AsyncPPOMATHConfig"],
    "realhf.training.main_async_ppo": ["main"],
}


def settings(*words: str) -> AsyncPPOMATHConfig:
    return load_expr_config(words, AsyncPPOMATHConfig)[0]


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_of_the_older_interface_import(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in PROMISED[module] if not hasattr(found, name)] == []


def test_both_spellings_of_the_agent_module_have_the_same_names() -> None:
    assert agent.__all__ == agent_api.__all__
    assert all(getattr(agent, name) is getattr(agent_api, name) for name in agent.__all__)


def test_name_belongs_to_one_class() -> None:
    class Mine(Agent):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue): ...

    register_agent("math-multi-turn", MathMultiTurnAgent)
    with pytest.raises(WorkflowError, match=r"'math-multi-turn' belongs to realhf\..*MathMultiTurnAgent and cannot be"):
        register_agent("math-multi-turn", Mine)
    with pytest.raises(WorkflowError, match="'math-code-single-step' belongs to"):
        register_environment("math-code-single-step", type("Other", (MathCodeSingleStepEnv,), {}))
    with pytest.raises(WorkflowError, match="is registered by its class"):
        register_agent("mine", Mine())
    assert AGENTS.find("math-multi-turn") is MathMultiTurnAgent


def test_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(WorkflowError, match=r"as 'math-multi', there are .*math-multi-turn.*call register_agent"):
        AGENTS.find("math-multi")
    assert ENVIRONMENTS.find("math-code-single-step") is MathCodeSingleStepEnv


@pytest.mark.parametrize(
    ("cls", "args", "complaint"),
    [
        (MathMultiTurnAgent, {"turns": 3}, "unexpected keyword argument 'turns'; its arguments are the `args`"),
        (MathCodeSingleStepEnv, {}, "missing a required argument: 'dataset_path'"),
        (Agent, {}, "must define collect_trajectory"),
    ],
)
def test_class_that_cannot_be_constructed_is_refused_early(cls: type, args: dict, complaint: str) -> None:
    with pytest.raises(WorkflowError, match=complaint):
        constructor_arguments(cls, args, {"gconfig": None, "tokenizer": None})


def test_defaults_are_the_built_in_model_and_task() -> None:
    config = settings()
    assert config.actor.path == "builtin:tiny-math"
    assert config.dataset.path == config.train_dataset.path == config.valid_dataset.path == "builtin:sort-digits"
    assert config.env.args["dataset_path"] == "builtin:sort-digits"


def test_settings_reach_the_agents_constructor_and_areal() -> None:
    words = ("my_param=5.0", "num_turns=3", "rollout.agent.turn_discount=0.5", "actor.optimizer.lr=1e-4")
    config = settings(*words, "total_train_steps=3", "gconfig.n_samples=4")
    assert config.agent.args == {"my_param": 5.0, "num_turns": 3, "turn_level_discount": 0.5}
    assert (config.actor.optimizer.lr, config.actor.optimizer.lr_scheduler) == (1e-4, "cosine")
    assert (config.total_train_steps, config.gconfig.n_samples, config.gconfig.max_new_tokens) == (3, 4, 48)


def test_path_of_the_dataset_has_two_names_and_one_value() -> None:
    for word in ("dataset.path=a.jsonl", "train_dataset.path=a.jsonl"):
        config = settings(word)
        assert config.dataset.path == config.train_dataset.path == "a.jsonl"
        assert config.valid_dataset.path == ""
    with pytest.raises(ConfigError, match=r"dataset.path=a.jsonl and train_dataset.path=b.jsonl differ"):
        settings("dataset.path=a.jsonl", "train_dataset.path=b.jsonl")


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("my_parm=5.0", "did you mean my_param"),
        ("actor.optimizer.learning_rate=1", "unknown setting actor.optimizer.learning_rate"),
        ("my_param=much", "my_param must be a finite number"),
        ("workflow=my.Agent", "workflow=my.Agent is not for this experiment"),
        ("rollout.agent.mode=subproc", "run inline"),
        ("rollout.agent.export_style=concat", "their own sequences"),
    ],
)
def test_setting_that_means_nothing_is_refused(word: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        settings(word)


def test_config_without_an_agent_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    class Bare(AsyncRLExperimentConfig, PPOMATHConfig):
        pass

    assert main(Bare, []) == 2
    assert "Bare must have a property `agent`" in capsys.readouterr().err


@pytest.mark.slow
def test_help_of_the_script_is_fast_to_load_and_lists_its_settings(tmp_path: Path) -> None:
    code = "import runpy, sys\nsys.argv = [sys.argv[1], '--help']\nsys.path.insert(0, 'gone')\n"
    code += "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit as end:\n"
    code += "    assert end.code == 0, end.code\n"
    code += "heavy = {'torch', 'transformers', 'openai', 'matplotlib', 'starlette'} & set(sys.modules)\n"
    code += "assert not heavy, heavy\n"
    script = PACKAGE / "training/main_async_ppo.py"
    done = subprocess.run(
        [sys.executable, "-c", code, script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "  my_param=1.0\n" in done.stdout
    assert "dataset.path=builtin:sort-digits" in done.stdout


async def test_environment_judges_questions_of_files_and_built_in_tasks(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"query_id": "q1", "prompt": "1/2 + 1/2?", "solutions": ["\\\\boxed{1}", "\\\\boxed{2/2}"]}\n{"id": 3}\n'
    )
    env = MathCodeSingleStepEnv(str(path))
    await env.reset()
    assert await env.step(("q1", ["It is 1.0", "2"])) == (None, [1.0, 0.0], True, False, {})
    with pytest.raises(WorkflowError, match=r"no question 'q2' in .*questions.jsonl; pass the path"):
        await env.step(("q2", ["1"]))
    with pytest.raises(WorkflowError, match=r"'3' of .*questions.jsonl must have an `answer` or `solutions`"):
        await env.step(("3", ["1"]))
    built_in = MathCodeSingleStepEnv("builtin:sort-digits")
    task = get_custom_dataset("test", DatasetConfig(path="builtin:sort-digits", size=1))[0]
    _, rewards, *_ = await built_in.step((question_id(task), [task["answer"], f"0{task['answer']}"]))
    assert rewards == [1.0, 0.0]
