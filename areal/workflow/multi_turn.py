"""The same question until the answer is right: after a wrong answer the user says so, and the model tries again.

An episode is a conversation: each try continues the ids of the one before, and its return flows back to it. The rows
are those of an agent that holds the same conversation through the proxy.
"""

import uuid
from collections.abc import Callable
from typing import Any

from torch import Tensor

from areal.api.engine_api import InferenceEngine
from areal.api.reward_api import AsyncRewardWrapper
from areal.config.errors import require
from areal.config.rollout import GenerationHyperparameters
from areal.infra import workflow_context
from areal.trajectory import Tree, assign_reward, export
from areal.trajectory.tensors import tensors_of_rows
from areal.utils import stats_tracker
from areal.workflow.math_task import TRY_AGAIN
from areal.workflow.rlvr import RLVRWorkflow


class MultiTurnWorkflow(RLVRWorkflow):
    """Completes `data["messages"]` up to `max_turns` times, or until a reward reaches `threshold`.

    The reward function is called for every try, as RLVRWorkflow calls it; `prompt` is then the conversation so far.
    The return of a try is its own reward plus `turn_discount` times that of the next one. It records `turns`, and as 0
    or 1 whether the first try (`first_try`) and any try (`success`) was right.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 2,
        turn_discount: float = 1.0,
        feedback: str = TRY_AGAIN,
        threshold: float = 1.0,
    ) -> None:
        """`feedback` is what the user says to a wrong answer."""
        super().__init__(reward_fn, gconfig, tokenizer)
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        require(0 <= turn_discount <= 1, f"turn_discount must lie in [0, 1], got {turn_discount}")
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.feedback = feedback
        self.threshold = threshold

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        tree = Tree(self._renderer)
        messages = list(self._messages(data))
        for _ in range(self.max_turns):
            reward = await self._try(engine, tree, messages, data)
            if reward is None:
                return None
            if reward >= self.threshold:
                break
            messages += [tree.completions[-1].message, {"role": "user", "content": self.feedback}]
        self._record(tree)
        return tensors_of_rows(export(tree, "individual", self.turn_discount))

    async def _try(
        self, engine: InferenceEngine, tree: Tree, messages: list[dict[str, Any]], data: dict[str, Any]
    ) -> float | None:
        """The reward of one more answer, which is then in the tree; None = the episode is rejected."""
        prompt = await self._continued(tree, messages)
        response = await self._ask(engine, prompt.ids)
        if response is None:
            return None
        answer = self._read(response, thinking=prompt.thinking)
        reward = await self._score(self._renderer.decode(prompt.ids), answer, response, data)
        if reward is None:
            return None
        node = tree.add(
            prompt, response, answer, completion_id=uuid.uuid4().hex, temperature=self.gconfig.sampling_temperature
        )
        assign_reward(tree, {node.id: reward}, "the reward function")
        return reward

    def _record(self, tree: Tree) -> None:
        right = [(node.reward or 0.0) >= self.threshold for node in tree.completions]
        stats_tracker.get(workflow_context.stat_scope()).scalar(
            reward=tree.reward, turns=len(right), first_try=right[0], success=right[-1]
        )
