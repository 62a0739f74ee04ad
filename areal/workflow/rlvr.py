"""One question, one completion, one verifiable reward: the shortest episode, without HTTP.

Prompts are rendered and answers are read as the proxy does it, so a task gives the same tokens either way.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import orjson

from areal.api.engine_api import InferenceEngine
from areal.api.errors import WorkflowError
from areal.api.io_struct import ModelRequest, ModelResponse, TokenIds
from areal.api.messages import Row
from areal.api.reward_api import AsyncRewardWrapper, as_reward, settings_of
from areal.api.workflow_api import RolloutWorkflow
from areal.config.rollout import GenerationHyperparameters
from areal.infra import workflow_context
from areal.trajectory.answer import Answer, read_answer
from areal.trajectory.message import Message
from areal.trajectory.rendering import LONG_TEXT, Renderer
from areal.trajectory.tensors import row_of_response, tensors_of_response
from areal.trajectory.tree import Prompt, Tree
from areal.utils import stats_tracker
from areal.utils.background import in_thread
from areal.utils.bounded_cache import BoundedCache

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")

POSITIONAL = ("prompt", "completion", "prompt_ids", "completion_ids")
"""What a reward function gets by position; the task's own keys follow by name."""
_AS_IS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
MAX_REMEMBERED_PROMPTS = 256
"""The samples of a group ask for the same prompt."""


class RLVRWorkflow(RolloutWorkflow):
    """Completes `data["messages"]`; the reward is `reward_fn(prompt, completion, prompt_ids, completion_ids, **data)`.

    `prompt` is the rendered chat template, `completion` the answer without its end token. A key of `data` that has the
    name of one of the four positional parameters of `reward_fn` is not passed: the episode's own value wins. To get
    the task's, name the parameter differently. Nor are keys that an attribute `settings` of `reward_fn` names: only a
    `functools.partial` sets those. A reward of None rejects the episode.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
    ) -> None:
        """Pass an AsyncRewardWrapper as `reward_fn` to choose its time-out, retries or what a failure counts as."""
        self._reward = reward_fn if isinstance(reward_fn, AsyncRewardWrapper) else AsyncRewardWrapper(reward_fn)
        self._not_passed = _positional_names(self._reward.reward_fn) | settings_of(self._reward.reward_fn)
        self._renderer = self._open_renderer(tokenizer)
        ending = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        stops = dict.fromkeys([*ending.stop_token_ids, *self._renderer.turn_end_ids])
        self.gconfig = ending.new(n_samples=1, stop_token_ids=list(stops))
        self.tokenizer = tokenizer
        self._prompts: BoundedCache[bytes, tuple[str, TokenIds]] = BoundedCache(MAX_REMEMBERED_PROMPTS)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> "dict[str, Tensor] | None":
        scored = await self._complete(engine, data, *await self._prompt(self._messages(data)))
        return None if scored is None else tensors_of_response(*scored, self.gconfig.sampling_temperature)

    async def arun_row(self, engine: InferenceEngine, data: dict[str, Any]) -> Row | None:
        """The same episode as a row: making tensors and reading them again takes longer than all the rest of it."""
        scored = await self._complete(engine, data, *await self._prompt(self._messages(data)))
        return None if scored is None else row_of_response(*scored, self.gconfig.sampling_temperature)

    def _open_renderer(self, tokenizer: Any) -> Renderer:
        return Renderer(tokenizer)

    def _messages(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            messages: list[dict[str, Any]] = data["messages"]
        except KeyError:
            raise WorkflowError(
                f"{type(self).__name__} needs a task with `messages`, got the keys "
                f"{', '.join(map(repr, data)) or 'none'}; "
                'pose it as {"messages": [{"role": "user", "content": ...}], ...}'
            ) from None
        return messages

    async def _prompt(self, messages: list[dict[str, Any]]) -> tuple[str, TokenIds]:
        """The messages as text for the model, and its tokens."""
        key = _key(messages)
        known = None if key is None else self._prompts.get(key)
        if known is None:
            text = self._renderer.render(messages, None)
            known = self._renderer.plain(text), TokenIds(await _encoded(text, self._renderer.encode, text))
            if key is not None:
                self._prompts.put(key, known)
        text, ids = known
        return text, TokenIds(ids)

    async def _continued(self, tree: Tree, messages: list[Message]) -> Prompt:
        """The prompt of a conversation with several turns."""
        draft = tree.draft(messages)
        return tree.settle(draft, await _encoded(draft.text, tree.encode, draft))

    async def _complete(
        self, engine: InferenceEngine, data: dict[str, Any], prompt: str, ids: list[int], images: Sequence[bytes] = ()
    ) -> tuple[ModelResponse, float] | None:
        """The engine's answer and its reward; None = there is no answer, or it is rejected."""
        response = await self._ask(engine, ids, images)
        if response is None:
            return None
        answer = self._read(response, thinking=self._renderer.opens_thinking(prompt))
        reward = await self._score(prompt, answer, response, data)
        if reward is None:
            return None
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
        return response, reward

    async def _ask(self, engine: InferenceEngine, ids: list[int], images: Sequence[bytes] = ()) -> ModelResponse | None:
        """The engine's answer; None = it gave none."""
        # Nobody reads its `rid`, and a random one costs a system call.
        request = ModelRequest("", ids, self.gconfig, self.tokenizer, images=list(images))
        response = await engine.agenerate(request)
        return None if response.stop_reason == "abort" or not response.output_tokens else response

    def _read(self, response: ModelResponse, *, thinking: bool) -> Answer:
        return read_answer(
            self._renderer,
            response,
            completion_id="",
            stop_ids=self.gconfig.stop_token_ids,
            stop_texts=self.gconfig.stop,
            thinking=thinking,
        )

    async def _score(self, prompt: str, answer: Answer, response: ModelResponse, data: dict[str, Any]) -> float | None:
        """What the reward function returns; None = it rejects the episode."""
        keywords = {key: value for key, value in data.items() if key not in self._not_passed}
        reward = await self._reward(
            prompt, answer.message["content"], response.input_tokens, response.output_tokens, **keywords
        )
        return None if reward is None else as_reward(reward, "the reward function")


def _key(messages: list[dict[str, Any]]) -> bytes | None:
    """Messages as JSON; None = they are not, and may look equal and be different."""
    try:
        key = orjson.dumps(messages, option=_AS_IS)
        # NaN is written so too.
        return json.dumps(messages).encode() if b"null" in key else key
    except TypeError:
        return None


async def _encoded(text: str, encode: Callable[P, list[int]], *args: P.args, **kwargs: P.kwargs) -> list[int]:
    """The tokens of `text`; of a long one in a thread, because the other episodes of the worker go on."""
    return await in_thread(encode, *args, **kwargs) if len(text) > LONG_TEXT else encode(*args, **kwargs)


def _positional_names(reward_fn: Callable[..., Any]) -> frozenset[str]:
    """The names that `reward_fn` has for what it gets by position, and so cannot get again by keyword."""
    try:
        parameters = list(inspect.signature(reward_fn).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return frozenset(POSITIONAL)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [parameter for parameter in parameters if parameter.kind in kinds][: len(POSITIONAL)]
    return frozenset(parameter.name for parameter in first if parameter.kind is kinds[1])
