"""A gymnasium environment in text: `render()` or the observation is shown, and an action is read from each answer."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import WorkflowError
from areal.config.rollout import GenerationHyperparameters
from areal.utils.installing import missing
from areal.workflow.text_environment import EnvironmentThread, Shown, TextEnvironmentWorkflow

if TYPE_CHECKING:
    from torch import Tensor

NOT_AN_ACTION = "That is not an action."
"""What the user says to an answer in which there is none; the environment does not notice it."""
_WHOLE = re.compile(r"-?\d{1,9}")
"""A number that may be an action: no part of 2.5 or of one with a thousand digits is."""


class GymnasiumWorkflow(TextEnvironmentWorkflow):
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
        super().__init__(gconfig, tokenizer, max_turns, turn_discount, step_seconds)
        self.env = env
        self.env_kwargs = env_kwargs or {}
        self.parse = parse

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> "dict[str, Tensor] | None":
        thread = EnvironmentThread(self, "gymnasium")
        try:
            env = await thread.make(_make, data.get("env", self.env), data.get("env_kwargs", self.env_kwargs))
            seen = await thread.call(_reset, env, data.get("seed"), data.get("options"))
            messages = [*data.get("messages", []), {"role": "user", "content": seen}]
            return await self.play(engine, messages, lambda answer: thread.call(_step, env, self.parse, answer))
        finally:
            thread.close()


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


def _reset(env: Any, seed: int | None, options: dict[str, Any] | None) -> str:
    observation, _ = env.reset(seed=seed, options=options)
    return _shown(env, observation)


def _step(env: Any, parse: Callable[[str], Any] | None, answer: str) -> Shown:
    action = parse(answer) if parse else _action(env.action_space, answer)
    if action is None or not env.action_space.contains(action):
        return NOT_AN_ACTION, 0.0, False
    observation, reward, terminated, truncated, _ = env.step(action)
    return _shown(env, observation), float(reward), bool(terminated or truncated)


def _action(space: Any, answer: str) -> Any:
    if not hasattr(space, "n"):
        return answer.strip()
    numbers = re.findall(r"-?\d+(?:\.\d+)*", answer)
    return int(numbers[-1]) if numbers and _WHOLE.fullmatch(numbers[-1]) else None


def _shown(env: Any, observation: Any) -> str:
    return str(env.render() if env.render_mode == "ansi" else observation)
