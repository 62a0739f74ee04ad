"""One question, one completion, one verifiable reward: the shortest episode, without HTTP.

Prompts are rendered and answers read as the proxy does it, so the same task gives the same tokens through either door.
"""

import inspect
import math
import uuid
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from areal.api.engine_api import InferenceEngine
from areal.api.errors import RewardInvalid, WorkflowError
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.config.generation import GenerationHyperparameters
from areal.infra import workflow_context
from areal.trajectory.answer import read_answer
from areal.trajectory.renderer import Renderer
from areal.utils import stats_tracker

POSITIONAL = ("prompt", "completion", "prompt_ids", "completion_ids")
"""What a reward function gets by position; the task's own keys follow by name."""


class RLVRWorkflow(RolloutWorkflow):
    """Completes `data["messages"]`; the reward is `reward_fn(prompt, completion, prompt_ids, completion_ids, **data)`.

    `prompt` is the rendered chat template, `completion` the answer without its end token. A key of `data` that has the
    name of one of the four positional parameters of `reward_fn` is not passed: the episode's own value wins. To see
    the task's, name the parameter differently. A reward of None rejects the episode.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
    ) -> None:
        """Pass an AsyncRewardWrapper as `reward_fn` to choose its time-out, retries or what a failure counts as."""
        self._reward = reward_fn if isinstance(reward_fn, AsyncRewardWrapper) else AsyncRewardWrapper(reward_fn)
        self._taken = _positional_names(self._reward.reward_fn)
        self._renderer = Renderer(tokenizer)
        ending = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        stops = dict.fromkeys([*ending.stop_token_ids, *self._renderer.turn_end_ids])
        self.gconfig = ending.new(n_samples=1, stop_token_ids=list(stops))
        self.tokenizer = tokenizer

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        prompt = self._renderer.render(_messages(data), None)
        request = ModelRequest(uuid.uuid4().hex, self._renderer.encode(prompt), self.gconfig, self.tokenizer)
        response = await engine.agenerate(request)
        if response.stop_reason == "abort" or not response.output_tokens:
            return None
        reward = await self._score(prompt, response, data)
        if reward is None:
            return None
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
        return _tensors(response, reward, self.gconfig)

    async def _score(self, prompt: str, response: ModelResponse, data: dict[str, Any]) -> float | None:
        answer = read_answer(
            self._renderer,
            response,
            completion_id="",
            stop_ids=self.gconfig.stop_token_ids,
            stop_texts=self.gconfig.stop,
        )
        own = {key: value for key, value in data.items() if key not in self._taken}
        reward = await self._reward(
            prompt, answer.message["content"], response.input_tokens, response.output_tokens, **own
        )
        return None if reward is None else _finite(reward)


def _messages(data: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        messages: list[dict[str, Any]] = data["messages"]
    except KeyError:
        raise WorkflowError(
            f"RLVRWorkflow needs a task with `messages`, got the keys {', '.join(map(repr, data)) or 'none'}; "
            'pose it as {"messages": [{"role": "user", "content": ...}], ...}'
        ) from None
    return messages


def _positional_names(reward_fn: Callable[..., Any]) -> frozenset[str]:
    """The names under which `reward_fn` knows what it gets by position, and so cannot get again by keyword."""
    try:
        parameters = list(inspect.signature(reward_fn).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return frozenset(POSITIONAL)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [parameter for parameter in parameters if parameter.kind in kinds][: len(POSITIONAL)]
    return frozenset(parameter.name for parameter in first if parameter.kind is kinds[1])


def _finite(reward: Any) -> float:
    """numpy and torch scalars are numbers too; text that looks like one is not."""
    plain = reward.item() if getattr(reward, "ndim", None) == 0 else reward
    if not isinstance(plain, Real) or not math.isfinite(plain):
        raise RewardInvalid(f"a reward must be a finite number, the reward function returned {reward!r:.200}")
    return float(plain)


def _tensors(response: ModelResponse, reward: float, gconfig: GenerationHyperparameters) -> dict[str, Tensor]:
    """Batch first, [1, L]; the sampled tokens are those that are trained."""
    asked, sampled = response.input_len, response.output_len
    temperature = 1.0 if gconfig.greedy else gconfig.temperature or 1.0
    row: dict[str, list[Any]] = {
        "input_ids": response.input_tokens + response.output_tokens,
        "attention_mask": [True] * (asked + sampled),
        "loss_mask": [False] * asked + [True] * sampled,
        "logprobs": [0.0] * asked + response.output_logprobs,
        "versions": [-1] * asked + response.output_versions,
        "temperatures": [1.0] * asked + [temperature] * sampled,
    }
    return {**{name: torch.tensor([values]) for name, values in row.items()}, "rewards": torch.tensor([reward])}
