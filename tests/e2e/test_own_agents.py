"""Agents that users write: in a module next to their script, in the script itself, and inside the driver."""

import os
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from real_runs import Start, rows_of, summary_of

from areal import PPOTrainer
from areal.api.cli_args import GenerationHyperparameters, GRPOConfig
from areal.api.errors import NothingAccepted
from areal.api.io_struct import ModelRequest
from areal.api.workflow_api import RolloutWorkflow
from areal.config.rollout import RolloutConfig

AGENT = """
from openai import AsyncOpenAI


class MyAgent:
    def __init__(self, prefix=""):
        self.prefix = prefix

    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        asked = [{"role": "user", "content": self.prefix + data["question"]}]
        response = await client.chat.completions.create(model="default", messages=asked)
        return float(response.choices[0].message.content == data["answer"])
"""

TRAINING = """
from areal import PPOTrainer
from areal.api.cli_args import GenerationHyperparameters, GRPOConfig

config = GRPOConfig(
    experiment_name="own", trial_name="one", total_train_steps=2,
    gconfig=GenerationHyperparameters(n_samples=4, max_new_tokens=8),
)
config.train_dataset.batch_size = 2
tasks = [{"question": "Sort %d" % n, "answer": "".join(sorted(str(n)))} for n in range(4321, 4331)]
with PPOTrainer(config, train_dataset=tasks) as trainer:
    result = trainer.train(workflow=WORKFLOW, workflow_kwargs={"prefix": ""})
print("trained", result.summary["steps"], result.model_dir)
"""


def test_agent_of_a_module_next_to_the_script_is_named_by_its_import_string(start: Start, tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(AGENT)
    (tmp_path / "train.py").write_text(TRAINING.replace("WORKFLOW", '"my_module.MyAgent"'))
    run = start("train.py")
    assert run.wait() == 0, run.text
    assert "trained 2 runs/own/one/checkpoints/step-000002" in run.lines
    assert len(rows_of(tmp_path / "runs/own/one/rollouts.jsonl")) == 2 * 2 * 4


def test_agent_of_the_script_itself_works_without_a_main_guard(start: Start, tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(AGENT + TRAINING.replace("WORKFLOW", "MyAgent"))
    run = start("notebook.py")
    assert run.wait() == 0, run.text
    assert [line for line in run.lines if line.startswith("trained")] == [
        "trained 2 runs/own/one/checkpoints/step-000002"
    ]


def inside_the_driver(output_dir: Path, **settings: Any) -> GRPOConfig:
    config = GRPOConfig(
        output_dir=str(output_dir),
        trial_name="one",
        total_train_steps=2,
        gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=8),
        rollout=RolloutConfig(in_process=True, **settings),
    )
    config.train_dataset.batch_size = 2
    return config


TASKS = [{"question": f"Sort {number}", "answer": "".join(sorted(str(number)))} for number in range(20, 40)]


def test_in_process_runs_episodes_where_a_breakpoint_would_stop_them(tmp_path: Path, tiny_math: Path) -> None:
    place = tmp_path / "seen"

    async def agent(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        asked = {"role": "user", "content": data["question"]}
        await client.chat.completions.create(model="default", messages=[asked])  # type: ignore[list-item]
        with place.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return float(data["question"] < "Sort 30")

    with PPOTrainer(inside_the_driver(tmp_path), train_dataset=TASKS) as trainer:
        result = trainer.train(workflow=agent)
    assert result.summary["steps"] == 2
    assert set(place.read_text().split()) == {str(os.getpid())}
    assert summary_of(result.run_dir)["steps"] == 2


def test_agent_that_always_raises_stops_the_run_with_its_cause(tmp_path: Path, tiny_math: Path) -> None:
    async def broken(data: dict[str, Any]) -> float:
        raise KeyError("no such tool")

    config = inside_the_driver(tmp_path, max_idle_rejections=4)
    with (
        PPOTrainer(config, train_dataset=TASKS, valid_dataset=TASKS) as trainer,
        pytest.raises(NothingAccepted, match=r"all failed alike .*broken raised KeyError: 'no such tool'"),
    ):
        trainer.train(workflow=broken)


class SomeForeignTokens(RolloutWorkflow):
    """Returns what it sampled, for every other task with a token that the model does not know."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        answer = await engine.agenerate(ModelRequest("r", [5, 6, 7], GenerationHyperparameters(max_new_tokens=4)))
        number = int(data["question"].removeprefix("Sort "))
        prompt = [5, 6, 10_000] if number % 2 else [5, 6, 7]
        return {"input_ids": prompt, "output_ids": answer.output_tokens, "reward": float(answer.output_tokens[0] % 2)}


def test_tokens_that_the_model_does_not_know_cost_their_episodes_and_not_the_run(
    tmp_path: Path, tiny_math: Path
) -> None:
    with PPOTrainer(inside_the_driver(tmp_path), train_dataset=TASKS) as trainer:
        result = trainer.train(workflow=SomeForeignTokens())
    assert result.summary["steps"] == 2
    assert result.summary["rejections"].keys() == {"agent_error"}
