"""The example guide: an async function, wrapped in an AgentWorkflow, and the older spelling of a setting."""

from pathlib import Path
from typing import Any

import pytest
from guide_stage import TASK, guide_stage
from openai import AsyncOpenAI

import areal
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.api.messages import Episode
from areal.api.workflow_api import AgentWorkflow
from areal.infra import workflow_context

ROOT = Path(areal.__file__).parents[1]


async def ask(data: dict[str, Any]) -> Any:
    """One call at the address that the environment or the episode's context gives."""
    here = workflow_context.get()
    client = AsyncOpenAI(base_url=here.base_url, api_key=here.api_key, http_client=here.http_client)
    return await client.chat.completions.create(model="default", messages=data["messages"])


async def my_agent(data: dict[str, Any]) -> float:
    response = await ask(data)
    return float(response.choices[0].message.content == data["answer"])


async def my_scoring_agent(data: dict[str, Any]) -> dict[str, float]:
    response = await ask(data)
    return {response.id: 0.25}


class MyAgentWorkflow(AgentWorkflow):
    async def run(self, data: dict[str, Any]) -> float:  # type: ignore[override]  # it needs no keywords
        return await my_agent(data)


@pytest.mark.parametrize(
    ("workflow", "reward"),
    [
        (MyAgentWorkflow, 1.0),
        (MyAgentWorkflow(), 1.0),
        (my_agent, 1.0),
        (my_scoring_agent, 0.25),
        ("test_example_guide.MyAgentWorkflow", 1.0),
        ("test_example_guide.my_agent", 1.0),
    ],
)
async def test_bare_function_and_its_wrapper_are_agents(workflow: Any, reward: float) -> None:
    async with guide_stage() as stage:
        episode = await stage.play(workflow)
    assert isinstance(episode, Episode), episode
    assert (episode.reward, episode.calls) == (reward, 1)


class EnvironmentAgent(AgentWorkflow):
    """Ignores everything that is injected: in a process of its own a client finds its address by itself."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        async with AsyncOpenAI() as client:
            response = await client.chat.completions.create(model="default", messages=data["messages"])
        return float(response.choices[0].message.content == data["answer"])


async def test_agent_that_ignores_what_it_is_given_runs_in_a_process() -> None:
    async with guide_stage() as stage:
        episode = await stage.play(EnvironmentAgent, TASK, mode="subproc")
    assert isinstance(episode, Episode), episode
    assert episode.reward == 1.0


def test_older_spelling_of_the_mode_is_accepted_with_the_examples_own_config() -> None:
    config_file = ROOT / "examples/agent_workflow/config.yaml"
    words = ["--config", str(config_file), "scheduler.type=local", "rollout.openai.mode=subproc"]
    config, path = load_expr_config(words, GRPOConfig)
    assert (config.rollout.agent.mode, config.scheduler.type, path) == ("subproc", "local", str(config_file))
