"""A gymnasium environment in text: what it shows, the model answers, until it ends.

An episode is a conversation. What the environment shows after `reset` is the user's first message, each answer is an
action, and what it shows after the `step` is the user's next message. The reward of a step goes to the completion that
caused it, and flows back to those before. The environment runs in a thread of the episode's own, under a deadline, so
that a slow one holds up no other episode.
"""

import asyncio
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from torch import Tensor

from areal.api.engine_api import InferenceEngine
from areal.api.errors import WorkflowError
from areal.config.errors import require
from areal.config.rollout import GenerationHyperparameters
from areal.infra import workflow_context
from areal.trajectory import Tree, assign_reward, export
from areal.trajectory.tensors import tensors_of_rows
from areal.utils import stats_tracker
from areal.utils.installing import missing
from areal.utils.logging import getLogger
from areal.workflow.rlvr import RLVRWorkflow

logger = getLogger("workflow")

NOT_AN_ACTION = "That is not an action."
"""What the user says to an answer in which there is none; the environment does not notice it."""


class GymnasiumWorkflow(RLVRWorkflow):
    """Plays `env`, an id that `gymnasium.make` takes (`my_module:Maze-v0` imports the module first).

    A task may have `seed` and `options` for `reset`, `env` and `env_kwargs` in place of the workflow's, and `messages`
    that come before the first observation. An environment with `render_mode="ansi"` shows what it renders, any other
    its observation as text. `parse` makes an action of an answer, None if there is none in it; without it a Discrete
    action is the answer's last number, and any other action is the answer itself. It records `turns` and `finished`,
    which is 1 if the environment ended the episode and not `max_turns`.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        env: str = "",
        env_kwargs: dict[str, Any] | None = None,
        parse: Callable[[str], Any] | None = None,
        max_turns: int = 16,
        turn_discount: float = 1.0,
        step_seconds: float = 30.0,
    ) -> None:
        """`step_seconds` is what each call of the environment may take."""
        super().__init__(_not_called, gconfig, tokenizer)
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        require(0 <= turn_discount <= 1, f"turn_discount must lie in [0, 1], got {turn_discount}")
        require(step_seconds > 0, f"step_seconds must be > 0, got {step_seconds}")
        self.env = env
        self.env_kwargs = env_kwargs or {}
        self.parse = parse
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.step_seconds = step_seconds

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="gymnasium")
        try:
            env = await self._call(thread, _make, data.get("env", self.env), data.get("env_kwargs", self.env_kwargs))
            try:
                return await self._play(engine, thread, env, data)
            finally:  # after the call that it is in, which may hang: the episode does not wait
                thread.submit(_close, env)
        finally:
            thread.shutdown(wait=False)

    async def _play(
        self, engine: InferenceEngine, thread: ThreadPoolExecutor, env: Any, data: dict[str, Any]
    ) -> dict[str, Tensor] | None:
        tree = Tree(self._renderer)
        seen = await self._call(thread, _reset, env, data.get("seed"), data.get("options"))
        messages = [*data.get("messages", []), {"role": "user", "content": seen}]
        finished = False
        while not finished and len(tree.completions) < self.max_turns:
            prompt = tree.prompt(messages)
            response = await self._ask(engine, prompt.ids)
            if response is None:
                return None
            answer = self._read(response, thinking=prompt.thinking)
            node = tree.add(
                prompt, response, answer, completion_id=uuid.uuid4().hex, temperature=self.gconfig.sampling_temperature
            )
            text = answer.message["content"] or ""
            seen, reward, finished = await self._call(thread, _step, env, self.parse, text)
            assign_reward(tree, {node.id: reward}, "the environment")
            messages += [node.message, {"role": "user", "content": seen}]
        stats_tracker.get(workflow_context.stat_scope()).scalar(
            reward=tree.reward, turns=len(tree.completions), finished=finished
        )
        return tensors_of_rows(export(tree, "individual", self.turn_discount))

    async def _call(self, thread: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
        call = asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
        try:
            return await asyncio.wait_for(call, self.step_seconds)
        except TimeoutError:
            raise WorkflowError(
                f"{function.__name__.strip('_')} of the environment must end within step_seconds={self.step_seconds}; "
                "raise it, or make the environment faster"
            ) from None


def _not_called(*_: Any, **__: Any) -> float:
    raise AssertionError("the environment gives the rewards")


def _make(env: str, kwargs: dict[str, Any]) -> Any:
    try:
        gymnasium = import_module("gymnasium")
    except ImportError as error:
        raise WorkflowError(missing("GymnasiumWorkflow needs gymnasium", error, "gymnasium")) from error
    if not env:
        raise WorkflowError("there is no environment; give the workflow or the task an `env`, as in my_module:Maze-v0")
    try:
        return gymnasium.make(env, **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise WorkflowError(f"gymnasium cannot make {env!r} with {kwargs}: {error}") from error


def _close(env: Any) -> None:
    try:
        env.close()
    except Exception:
        logger.exception("an environment could not be closed")


def _reset(env: Any, seed: int | None, options: dict[str, Any] | None) -> str:
    observation, _ = env.reset(seed=seed, options=options)
    return _shown(env, observation)


def _step(env: Any, parse: Callable[[str], Any] | None, answer: str) -> tuple[str, float, bool]:
    """What is shown next, the reward, and whether the episode is over."""
    action = parse(answer) if parse else _action(env.action_space, answer)
    if action is None or not env.action_space.contains(action):
        return NOT_AN_ACTION, 0.0, False
    observation, reward, terminated, truncated, _ = env.step(action)
    return _shown(env, observation), float(reward), bool(terminated or truncated)


def _action(space: Any, answer: str) -> Any:
    if not hasattr(space, "n"):
        return answer.strip()
    numbers = re.findall(r"-?\d{1,9}", answer)
    return int(numbers[-1]) if numbers else None


def _shown(env: Any, observation: Any) -> str:
    return str(env.render() if env.render_mode == "ansi" else observation)
