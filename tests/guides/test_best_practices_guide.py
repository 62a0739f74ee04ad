"""Episodes as the best-practices guide asks for them: awaited throughout, rewards wrapped, clients shared."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiofiles
import pytest
import torch
from aiohttp import web
from guide_stage import TASK, guide_stage
from openai import AsyncOpenAI

from areal.api.io_struct import ModelRequest
from areal.api.messages import Episode
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context


def slow_reward(prompt_str: str, completion_str: str, **data: Any) -> float:
    """Takes its keywords from the task, as the guide passes them."""
    assert "7 + 5" in prompt_str
    return float(completion_str.strip() == data["answer"])


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A tool that an episode asks over HTTP."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"unit": "apples"})

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


class Careful(RolloutWorkflow):
    """Reads a file, asks a service, generates and scores, and waits for each without blocking other episodes."""

    made = 0

    def __init__(self, reward_fn: Any, gconfig: Any, tokenizer: Any) -> None:
        type(self).made += 1
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        session = await workflow_context.get_aiohttp_session()
        async with session.get(data["url"]) as response:
            unit = (await response.json())["unit"]
        async with aiofiles.open(data["path"]) as file:
            hint = await file.read()
        asked = [{"role": "user", "content": f"{hint}{data['question']} {unit}"}]
        ids = self.tokenizer.apply_chat_template(asked, tokenize=True, add_generation_prompt=True)
        resp = await engine.agenerate(ModelRequest(rid=uuid.uuid4().hex, input_ids=ids, gconfig=self.gconfig))
        prompt_str = self.tokenizer.decode(ids)
        completion_str = self.tokenizer.decode(resp.output_tokens, skip_special_tokens=True)
        reward = await self.async_reward_fn(prompt_str, completion_str, **data)
        return {
            "input_ids": torch.tensor(resp.input_tokens),
            "output_ids": torch.tensor(resp.output_tokens),
            "reward": torch.tensor(reward),
        }


async def test_awaited_file_http_and_reward_make_an_episode(tmp_path: Path, url: str) -> None:
    hint = tmp_path / "hint.txt"
    hint.write_text("Count: ")
    task = {"path": str(hint), "url": url, "question": "What is 7 + 5?", "answer": "12"}
    async with guide_stage(reward_fn=f"{__name__}.slow_reward") as stage:
        episode = await stage.play(Careful, task)
    assert isinstance(episode, Episode), episode
    assert episode.reward == 1.0
    assert "Count: What is 7 + 5? apples" in stage.prompts[0]


class Sharing:
    """An agent that takes what is injected, and falls back on the environment."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        http_client = extra_kwargs.get("http_client")
        assert http_client is await workflow_context.get_httpx_client()
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
            api_key=extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY"),
            http_client=http_client,
            max_retries=0,
        )
        async with client:  # leaving it must not take the client from the others
            response = await client.chat.completions.create(model="default", messages=data["messages"])
        return float(response.choices[0].message.content == data["answer"])


async def test_shared_client_serves_episodes_that_close_it() -> None:
    async with guide_stage() as stage:
        episodes = await asyncio.gather(*(stage.play(Sharing) for _ in range(8)))
    assert [episode.reward for episode in episodes if isinstance(episode, Episode)] == [1.0] * 8


async def test_many_model_calls_of_one_episode_wait_together() -> None:
    async def agent(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> dict[str, float]:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        ask = client.chat.completions.create
        answers = await asyncio.gather(*(ask(model="default", messages=data["messages"]) for _ in range(4)))
        return {answer.id: float(answer.choices[0].message.content == data["answer"]) for answer in answers}

    async with guide_stage() as stage:
        episode = await stage.play(agent, TASK)
    assert isinstance(episode, Episode), episode
    assert (episode.calls, episode.reward, len(episode.rows)) == (4, 4.0, 4)
