"""The files that `areal new` writes, with `$name` where a name goes. They run as they are."""

from dataclasses import dataclass
from string import Template

WORKFLOW = Template('''\
"""$class_name: one question, one answer, one reward."""

import uuid
from collections.abc import Callable
from typing import Any

import torch
${blank_in_checkout}from areal.api.cli_args import GenerationHyperparameters
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow


class $class_name(RolloutWorkflow):
    """Answers `data["messages"]`; the reward is `reward_fn(prompt, completion, prompt_ids, completion_ids, **data)`."""

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any, reward_fn: Callable[..., float]) -> None:
        """Called once per worker: whatever is slow to set up belongs here."""
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer = tokenizer
        self.reward = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """One episode; None rejects it. Episodes share an event loop, so everything that waits is awaited."""
        prompt = self.tokenizer.apply_chat_template(data["messages"], tokenize=False, add_generation_prompt=True)
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        response = await engine.agenerate(ModelRequest(uuid.uuid4().hex, prompt_ids, self.gconfig, self.tokenizer))
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        reward = await self.reward(prompt, completion, response.input_tokens, response.output_tokens, **data)
        return _tensors(response, reward)


def _tensors(response: ModelResponse, reward: float) -> dict[str, torch.Tensor]:
    """Batch first, [1, length]; `concat_padded_tensors` of areal.utils.data joins several of these."""
    prompt, sampled = response.input_len, response.output_len
    return {
        "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
        "attention_mask": torch.ones(1, prompt + sampled, dtype=torch.bool),
        "loss_mask": torch.tensor([[False] * prompt + [True] * sampled]),
        "logprobs": torch.tensor([[0.0] * prompt + response.output_logprobs]),
        "versions": torch.tensor([[-1] * prompt + response.output_versions]),
        "rewards": torch.tensor([float(reward)]),
    }
''')

WORKFLOW_TEST = Template('''\
"""$class_name against a fake engine, which answers what the test wants."""

from typing import Any

import pytest
${blank_in_checkout}from areal.api.cli_args import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
${blank_elsewhere}from $module import $class_name

TASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}
TOKENIZER = make_tokenizer(["What is 2 + 2?"], vocab_size=300, max_positions=512)


def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(completion == data["answer"])


@pytest.mark.asyncio
@pytest.mark.parametrize(("answer", "expected"), [("4", 1.0), ("5", 0.0)])
async def test_answer_is_rewarded_and_its_tokens_are_trained(answer: str, expected: float) -> None:
    sampled = [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]
    engine = FakeEngine(vocab_size=len(TOKENIZER), script=lambda prompt: sampled, tokenizer=TOKENIZER)
    workflow = $class_name(GenerationHyperparameters(max_new_tokens=16), TOKENIZER, reward)

    episode = await workflow.arun_episode(engine, TASK)

    assert episode is not None
    assert episode["rewards"].tolist() == [expected]
    assert episode["input_ids"][episode["loss_mask"]].tolist() == sampled
''')

AGENT = Template('''\
"""$class_name: an agent on the OpenAI SDK."""

from typing import Any

from openai import AsyncOpenAI


class $class_name:
    """Asks once; 1.0 if the answer is right, else 0.0."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float]:
        """One episode. Episodes share an event loop, so everything that waits is awaited."""
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        response = await client.chat.completions.create(model="default", messages=data["messages"])
        # A number rewards the last answer; {response.id: number, ...} rewards each answer.
        return float((response.choices[0].message.content or "").strip() == data["answer"])
''')

AGENT_TEST = Template('''\
"""$class_name against a fake engine, which answers what the test wants, through the proxy as in training."""

from typing import Any

import pytest
${blank_in_checkout}from areal.api.cli_args import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.proxy import Proxy
${blank_elsewhere}from $module import $class_name

TASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}
TOKENIZER = make_tokenizer(["What is 2 + 2?"], vocab_size=300, max_positions=512)


@pytest.mark.asyncio
@pytest.mark.parametrize(("answer", "expected"), [("4", 1.0), ("5", 0.0)])
async def test_answer_is_rewarded(answer: str, expected: float) -> None:
    sampled = [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]
    engine = FakeEngine(vocab_size=len(TOKENIZER), script=lambda prompt: sampled, tokenizer=TOKENIZER)
    proxy = Proxy(engine, TOKENIZER, gconfig=GenerationHyperparameters(max_new_tokens=16), max_positions=512)
    await proxy.start()
    try:
        session = proxy.open_session()
        keys = {"base_url": session.base_url, "api_key": session.api_key, "http_client": proxy.http_client}

        reward = await $class_name().run(TASK, **keys)

        assert reward == expected
        assert [completion.output_ids.tolist() for completion in session.tree.completions] == [sampled]
    finally:
        await proxy.aclose()
''')


@dataclass(frozen=True)
class FileTemplates:
    suffix: str
    """Of the class's name."""
    code: Template
    test: Template
    reward_fn: str = ""
    """What the constructor is given in the printed commands, by its import string."""


KINDS = {
    "workflow": FileTemplates("Workflow", WORKFLOW, WORKFLOW_TEST, "areal.reward.exact_match_reward"),
    "agent": FileTemplates("Agent", AGENT, AGENT_TEST),
}
