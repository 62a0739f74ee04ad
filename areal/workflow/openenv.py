"""An OpenEnv environment in text, in this process or on a server: an answer is one field of its action.

`my_module:MyEnvironment` is made for each episode, in a thread of its own. An address (`http://host:8000`) is a server
of `openenv`, wherever it runs; each episode has a session of it.
"""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from importlib import import_module
from textwrap import shorten
from typing import TYPE_CHECKING, Any, get_type_hints

import httpx

from areal.api.engine_api import InferenceEngine
from areal.api.errors import ArealError, WorkflowError
from areal.api.reward_api import as_reward
from areal.config.rollout import GenerationHyperparameters
from areal.infra import workflow_context
from areal.utils.installing import missing
from areal.workflow.gymnasium_text import NOT_AN_ACTION
from areal.workflow.text_environment import EnvironmentThread, Shown, TextEnvironmentWorkflow, logger

if TYPE_CHECKING:
    from torch import Tensor

_NOT_SHOWN = ("done", "reward", "metadata")
"""Fields that every observation has, and every action's `metadata`."""
_REFUSED = "VALIDATION_ERROR"
"""The code by which a server says that an action is none."""
CLOSE_SECONDS = 3.0
"""For the end of a session, which a cancelled episode waits for too."""


class OpenEnvWorkflow(TextEnvironmentWorkflow):
    """Plays `env`, the address of an OpenEnv server or `module:Class` of an `Environment`.

    A task may have `seed` and `options` (a dict) for `reset`, `env` and `env_kwargs` in place of the workflow's, and
    `messages` that come before the first observation. The answer becomes `action_field` of an action; it may be left
    out where the action has one required field. `observation_field` is what is shown; without it the only field that
    is text, else all of them as JSON. An answer that the action does not accept costs a turn, and the environment does
    not step.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        env: str = "",
        env_kwargs: dict[str, Any] | None = None,
        action_field: str = "",
        observation_field: str = "",
        max_turns: int = 16,
        turn_discount: float = 1.0,
        step_seconds: float = 30.0,
    ) -> None:
        """`env_kwargs` are those of the class; `step_seconds` is what each call of the environment may take."""
        super().__init__(gconfig, tokenizer, max_turns, turn_discount, step_seconds)
        self.env = env
        self.env_kwargs = env_kwargs or {}
        self.action_field = action_field
        self.observation_field = observation_field
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._core = _library()  # now, because it takes seconds, which no episode has

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> "dict[str, Tensor] | None":
        env = data.get("env", self.env)
        if not env:
            raise WorkflowError(
                "there is no environment; give the workflow or the task an `env`, as in my_module:MyEnvironment or "
                "http://localhost:8000"
            )
        return await (self._on_server if "://" in env else self._in_process)(engine, env, data)

    async def _in_process(self, engine: InferenceEngine, env: str, data: dict[str, Any]) -> "dict[str, Tensor] | None":
        thread = EnvironmentThread(self, "openenv")
        try:
            made = await thread.make(_make, self._core, env, data.get("env_kwargs", self.env_kwargs))
            action = _action_class(self._core, made)
            field = self._field(env, action.model_json_schema())
            seen = await thread.call(_reset, made, _reset_arguments(data))
            messages = [*data.get("messages", []), {"role": "user", "content": self._text(_fields(seen))}]

            async def step(answer: str) -> Shown:
                try:
                    accepted = action.model_validate({field: answer.strip()})
                except ValueError:  # pydantic's ValidationError is one
                    return NOT_AN_ACTION, 0.0, False
                seen = await thread.call(_step, made, accepted)
                return self._text(_fields(seen)), _reward(seen, env), bool(seen.done)

            return await self.play(engine, messages, step)
        finally:
            thread.close()

    async def _on_server(self, engine: InferenceEngine, url: str, data: dict[str, Any]) -> "dict[str, Tensor] | None":
        field = self._field(url, await self._action_schema(url))
        later = 2 * self.step_seconds  # the deadline is `in_time`'s
        client = self._core.GenericEnvClient(base_url=url, connect_timeout_s=later, message_timeout_s=later)
        try:
            await self.in_time(client.connect(), "connect")
        except (OSError, ConnectionError) as error:
            raise WorkflowError(f"there is no OpenEnv server at {url}: {error}; start it, or change `env`") from error

        async def ask(call: Awaitable[Any], name: str) -> Shown | None:
            """None = it was asked to step with what is no action."""
            try:
                return self._shown_by(url, await self.in_time(call, name))
            except ArealError:
                raise
            except Exception as error:  # whatever the library raises for what its server says, or for its end
                if name == "step" and isinstance(error, RuntimeError) and _REFUSED in str(error):
                    return None
                said = shorten(" ".join(str(error).split()) or type(error).__name__, 400, placeholder=" …")
                raise WorkflowError(f"the OpenEnv server at {url} failed in {name}: {said}") from error

        try:
            first = await ask(client.reset(**_reset_arguments(data)), "reset")
            assert first is not None
            messages = [*data.get("messages", []), {"role": "user", "content": first[0]}]

            async def step(answer: str) -> Shown:
                return await ask(client.step({field: answer.strip()}), "step") or (NOT_AN_ACTION, 0.0, False)

            return await self.play(engine, messages, step)
        finally:
            await _leave(client, url)

    def _shown_by(self, url: str, seen: Any) -> Shown:
        """What a server's answer to a reset or a step says."""
        if not isinstance(seen.observation, Mapping):
            raise WorkflowError(
                f"an observation of the OpenEnv server at {url} must be an object, got {seen.observation!r:.60}"
            )
        return self._text(seen.observation), _reward(seen, url), bool(seen.done)

    async def _action_schema(self, url: str) -> Mapping[str, Any]:
        """What its actions look like, asked for once."""
        if url not in self._schemas:
            client = await workflow_context.get_httpx_client()
            address = "http" + url.removeprefix("ws") if url.startswith("ws") else url
            try:
                answer = await client.get(f"{address.rstrip('/')}/schema", timeout=self.step_seconds)
                schema = answer.raise_for_status().json()["action"]
                if not isinstance(schema["properties"], Mapping):
                    raise TypeError("its actions have no properties")
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
                raise WorkflowError(
                    f"there is no OpenEnv server at {url}: {error}; start it, or change `env`"
                ) from error
            self._schemas[url] = schema
        return self._schemas[url]

    def _field(self, env: str, schema: Mapping[str, Any]) -> str:
        """The field of an action that an answer becomes."""
        fields = [name for name in schema.get("properties", {}) if name not in _NOT_SHOWN]
        required = [name for name in schema.get("required", []) if name in fields] or fields
        if self.action_field:
            if self.action_field not in fields:
                raise WorkflowError(
                    f"an action of {env} has no field {self.action_field!r}; it has {', '.join(fields)}"
                )
            return self.action_field
        if len(required) != 1:
            raise WorkflowError(
                f"an answer becomes one field of an action, and that of {env} has {', '.join(required) or 'none'}; "
                "name one with action_field"
            )
        return str(required[0])

    def _text(self, observation: Mapping[str, Any]) -> str:
        shown = {name: value for name, value in observation.items() if name not in _NOT_SHOWN}
        if self.observation_field:
            if self.observation_field not in shown:
                raise WorkflowError(
                    f"an observation has no field {self.observation_field!r}; it has {', '.join(shown) or 'none'}"
                )
            return str(shown[self.observation_field])
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(shown, default=str)


async def _leave(client: Any, url: str) -> None:
    """End the session. The episode is over, so a server that does not take part in its end changes nothing."""
    try:
        await asyncio.wait_for(client.close(), CLOSE_SECONDS)
    except Exception as error:
        logger.warning("the session at the OpenEnv server %s could not be closed: %r", url, error)


def _library() -> Any:
    try:
        return import_module("openenv.core")
    except ImportError as error:
        raise WorkflowError(missing("OpenEnvWorkflow needs openenv", error, "openenv")) from error


def _make(core: Any, env: str, kwargs: dict[str, Any]) -> Any:
    module, _, name = env.partition(":")
    try:
        made = getattr(import_module(module), name)(**kwargs)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise WorkflowError(
            f"`env` must be module:Class of an OpenEnv Environment, or the address of a server, got {env!r} with "
            f"{kwargs}: {error}"
        ) from error
    if not isinstance(made, core.Environment):
        raise WorkflowError(f"{env} must be an OpenEnv Environment, it is a {type(made).__name__}")
    return made


def _action_class(core: Any, env: Any) -> Any:
    """What its `step` says that it takes."""
    try:
        action = get_type_hints(type(env).step).get("action")
    except NameError:  # annotations that only a type checker can read
        action = None
    if not (isinstance(action, type) and issubclass(action, core.Action)):
        raise WorkflowError(
            f"`step` of {type(env).__name__} must annotate its `action` with a subclass of Action, got {action!r:.60}; "
            "or serve the environment and give its address"
        )
    return action


def _reset(env: Any, arguments: dict[str, Any]) -> Any:
    return env.reset(**arguments)


def _step(env: Any, action: Any) -> Any:
    return env.step(action)


def _reward(seen: Any, env: str) -> float:
    return 0.0 if seen.reward is None else as_reward(seen.reward, env)


def _fields(observation: Any) -> dict[str, Any]:
    return dict(observation.model_dump(mode="json"))


def _reset_arguments(data: dict[str, Any]) -> dict[str, Any]:
    seed = {} if data.get("seed") is None else {"seed": data["seed"]}
    return {**seed, **(data.get("options") or {})}
