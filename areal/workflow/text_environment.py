"""Environments in text, whatever library they come from: what one shows, the model answers, until it ends.

An episode is a conversation. What the environment shows after its reset is the user's first message, each answer is an
action, and what it shows after the step is the user's next message. The reward of a step goes to the completion that
caused it, and flows back to those before.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import WorkflowError
from areal.config.errors import require
from areal.config.rollout import GenerationHyperparameters
from areal.infra import workflow_context
from areal.trajectory import Tree, assign_reward, export
from areal.trajectory.tensors import tensors_of_rows
from areal.utils import stats_tracker
from areal.utils.background import OwnThread
from areal.utils.logging import getLogger
from areal.workflow.rlvr import RLVRWorkflow

if TYPE_CHECKING:
    from torch import Tensor

logger = getLogger("workflow")

Shown = tuple[str, float, bool]
"""What the environment shows after a step, the step's reward, and whether the episode is over."""


class TextEnvironmentWorkflow(RLVRWorkflow):
    """What the workflows of all libraries share; it records `turns` and `finished`, which is 1 if the environment
    ended the episode and not `max_turns`."""

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int,
        turn_discount: float,
        step_seconds: float,
    ) -> None:
        """`step_seconds` is what each call of the environment may take."""
        super().__init__(_not_called, gconfig, tokenizer)
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        require(0 <= turn_discount <= 1, f"turn_discount must lie in [0, 1], got {turn_discount}")
        require(step_seconds > 0, f"step_seconds must be > 0, got {step_seconds}")
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.step_seconds = step_seconds

    async def play(
        self,
        engine: InferenceEngine,
        messages: list[dict[str, Any]],
        step: Callable[[str], Awaitable[Shown]],
    ) -> "dict[str, Tensor] | None":
        """The episode that begins with `messages`, of which the last is what the environment showed first."""
        tree = Tree(self._renderer)
        messages = list(messages)
        finished = False
        while not finished and len(tree.completions) < self.max_turns:
            prompt = await self._continued(tree, messages)
            response = await self._ask(engine, prompt.ids)
            if response is None:
                return None
            answer = self._read(response, thinking=prompt.thinking)
            node = tree.add(
                prompt, response, answer, completion_id=uuid.uuid4().hex, temperature=self.gconfig.sampling_temperature
            )
            seen, reward, finished = await step(answer.message["content"] or "")
            assign_reward(tree, {node.id: reward}, "the environment")
            messages += [node.message, {"role": "user", "content": seen}]
        stats_tracker.get(workflow_context.stat_scope()).scalar(
            reward=tree.reward, turns=len(tree.completions), finished=finished
        )
        return tensors_of_rows(export(tree, "individual", self.turn_discount))

    async def in_time(self, call: Awaitable[Any], name: str) -> Any:
        """What a call of the environment returns, or a WorkflowError at its deadline."""
        deadline = asyncio.timeout(self.step_seconds)
        try:
            async with deadline:
                return await call
        except TimeoutError:
            if not deadline.expired():  # the environment's own, such as that of a request it made
                raise
            raise WorkflowError(
                f"{name} of the environment must end within step_seconds={self.step_seconds}; "
                "raise it, or make the environment faster"
            ) from None


class EnvironmentThread:
    """One episode's environment and the thread that it lives in, so that a slow one holds up no other episode."""

    def __init__(self, workflow: TextEnvironmentWorkflow, name: str) -> None:
        self._workflow = workflow
        self._thread = OwnThread(name)
        self._env: Any = None

    async def make(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The environment, which `close` closes, even one that is only made after the deadline."""
        return await self.call(self._make, function, *arguments)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Under the workflow's deadline; the thread cannot be stopped, and ends when the call does."""
        return await self._workflow.in_time(self._thread.run(function, *arguments), function.__name__.strip("_"))

    def close(self) -> None:
        """After the call that the environment is in, which may hang: the episode does not wait."""
        self._thread.end(self._close)

    def _make(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._env = function(*arguments)
        return self._env

    def _close(self) -> None:
        if self._env is None:
            return
        try:
            self._env.close()
        except Exception:
            logger.exception("an environment could not be closed")


def _not_called(*_: Any, **__: Any) -> float:
    raise AssertionError("the environment gives the rewards")
