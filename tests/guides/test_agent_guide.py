"""Agents as the agent guide describes them: a class with `run`, two modes, one reward or one for each answer."""

import os
from typing import Any

import pytest
from guide_stage import TASK, guide_stage
from openai import AsyncOpenAI, OpenAI

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.api.messages import Episode


def compute_reward(response: Any, answer: str) -> float:
    return 1.0 if response.choices[0].message.content == answer else 0.0


class PlainAgent:
    """Asks once with the SDK, at the address it is given."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
            api_key=extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        response = await client.chat.completions.create(model="default", messages=data["messages"])
        return compute_reward(response, data["answer"])


class SyncAgent:
    """For mode subproc: a synchronous client that finds its address in the environment, and any key."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        assert "http_client" not in extra_kwargs
        client = OpenAI(base_url=os.getenv("OPENAI_BASE_URL"), api_key="DUMMY")
        response = client.chat.completions.create(model="default", messages=data["messages"])
        return compute_reward(response, data["answer"])


class TwoTurns:
    """Rewards each of its answers by the id of its response."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        keys = {name: extra_kwargs[name] for name in ("base_url", "api_key", "http_client")}
        client = AsyncOpenAI(max_retries=0, **keys)
        messages = list(data["messages"])
        rewards: dict[str, float] = {}
        for reward in (0.5, 1.0):
            response = await client.chat.completions.create(model="default", messages=messages)
            rewards[response.id] = reward
            messages += [response.choices[0].message, {"role": "user", "content": "Try again."}]
        return rewards


@pytest.mark.parametrize(("said", "reward"), [("12", 1.0), ("13", 0.0)])
async def test_number_rewards_the_last_answer(said: str, reward: float) -> None:
    async with guide_stage(lambda prompt: said) as stage:
        episode = await stage.play("test_agent_guide.PlainAgent")
    assert isinstance(episode, Episode), episode
    assert (episode.reward, episode.calls, len(episode.rows)) == (reward, 1, 1)


async def test_synchronous_client_with_any_key_works_in_a_process() -> None:
    async with guide_stage() as stage:
        episode = await stage.play(SyncAgent, mode="subproc")
    assert isinstance(episode, Episode), episode
    assert (episode.reward, episode.calls) == (1.0, 1)


@pytest.mark.parametrize(("style", "rows"), [("individual", 2), ("concat", 1)])
async def test_dict_rewards_each_answer_and_discounts_earlier_turns(style: str, rows: int) -> None:
    async with guide_stage() as stage:
        episode = await stage.play(TwoTurns, TASK, turn_discount=0.9, export_style=style)
    assert isinstance(episode, Episode), episode
    assert len(episode.rows) == rows
    returns = [float(value) for row in episode.rows for value in dict.fromkeys(row.returns[row.loss_mask].tolist())]
    assert returns == pytest.approx([0.5 + 0.9, 1.0])


def test_settings_of_the_guide_are_known() -> None:
    words = ["rollout.agent.mode=subproc", "rollout.agent.turn_discount=0.9"]
    words += ["rollout.agent.export_style=concat", "rollout.agent.subproc_max_workers=4"]
    config, _ = load_expr_config(words, GRPOConfig)
    agent, plain = config.rollout.agent, GRPOConfig().rollout.agent
    assert (agent.mode, agent.turn_discount, agent.export_style, agent.subproc_max_workers) == (
        "subproc",
        0.9,
        "concat",
        4,
    )
    assert (plain.mode, plain.turn_discount, plain.export_style, plain.subproc_max_workers) == (
        "inline",
        1.0,
        "individual",
        4,
    )
