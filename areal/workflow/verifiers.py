"""An environment of the verifiers library as an agent: it calls the model, and its rewards are the reward.

The environment's harness talks to the session that it is given, through the library's own server and client; tokens are
those that the proxy recorded. Each episode has an environment and a server of its own, because the library's server
keeps a client for every address that it ever called. Needs verifiers 0.4 or newer (`verifiers.v1`).
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from areal.api.errors import WorkflowError
from areal.api.workflow_api import AgentWorkflow
from areal.infra import workflow_context
from areal.utils import stats_tracker
from areal.utils.background import in_thread
from areal.utils.installing import missing
from areal.workflow.math_task import MODEL

_NO_KEY = "AREAL_VERIFIERS_KEY"
"""A variable that nobody sets: the address of a session is its credential, and any key is accepted there."""
_LIBRARYS_HARNESS = "bash"
"""What the library takes where a taskset brings no harness; it runs the model's commands on this machine."""
_HARNESS = "null"
"""Taken in place of it: a conversation, with the tools of the task's MCP servers and nothing else."""


class VerifiersWorkflow(AgentWorkflow):
    """Plays tasks of `verifiers:ID`.

    `env` is the id of a taskset, the config of an environment as a dict (`{"taskset": {"id": ...}, "agent": {...}}`),
    or an `Env`, of which each episode makes its own; None = each task says what it belongs to. What the config leaves
    open runs on this machine (`subprocess`), where the library would rent a sandbox. A harness must be named or come
    with the taskset if it is to do more than converse. The metrics of a trace are figures of the run.
    """

    def __init__(self, env: Any = None) -> None:
        try:
            self._library = import_module("verifiers.v1")
        except ImportError as error:
            raise WorkflowError(missing("VerifiersWorkflow needs the verifiers library", error, "verifiers")) from error
        self._class = None
        if isinstance(env, self._library.Env):
            env, self._class = env.config, type(env)
        self._config = None if env is None else self._completed(env)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        vf = self._library
        # In threads: the first call imports the environment, which may take seconds.
        config = self._config or await in_thread(self._completed, data.get("environment"))
        env = await in_thread(self._make, config)
        task = self._task(env, data)
        # No limit of its own for connecting: the episode has its deadline.
        client = vf.EvalClientConfig(
            base_url=_base_url(extra_kwargs), api_key_var=_NO_KEY, timeout={"connect": None, "read": None}
        )
        async with env.serving():
            episode = await env.run_episode(task, vf.ModelContext(model=MODEL, client=client))
        return self._reward(config, episode)

    def _make(self, config: Any) -> Any:
        try:
            return self._class(config) if self._class else self._library.load_environment(config)
        except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
            raise WorkflowError(f"verifiers cannot make the environment {config.env_id!r}: {_line(error)}") from error

    def _task(self, env: Any, data: dict[str, Any]) -> Any:
        if not isinstance(data.get("task"), Mapping):
            raise WorkflowError(
                "VerifiersWorkflow needs a task with `task`, the data of a verifiers task, got the keys "
                f"{', '.join(map(repr, data)) or 'none'}; read tasks from verifiers:ID"
            )
        kind = type(env.taskset).task_type()
        try:
            return kind(kind.data_type().model_validate(data["task"]), env.taskset.config.task)
        except ValueError as error:
            raise WorkflowError(f"`task` must be the data of a {kind.__name__}: {_line(error)}") from error

    def _completed(self, env: Any) -> Any:
        """The environment's config, with this machine where it names no place."""
        vf = self._library
        if not env:
            raise WorkflowError(
                "there is no environment; give VerifiersWorkflow an `env`, or read tasks from verifiers:ID"
            )
        told = {"taskset": {"id": env}} if isinstance(env, str) else env
        try:
            config = vf.resolve_env_config(told)
            harness = vf.default_harness_id(config.taskset.id)
            changes = {}
            for name, role in config:
                if not isinstance(role, vf.AgentConfig):
                    continue
                here: dict[str, Any] = {}
                if "runtime" not in role.model_fields_set:
                    here["runtime"] = vf.SubprocessConfig()
                if role.harness is None and harness == _LIBRARYS_HARNESS:
                    here["harness"] = vf.harness_config_type(_HARNESS)(id=_HARNESS)
                changes[name] = role.model_copy(update=here)
            return config.model_copy(update=changes)
        except (ImportError, AttributeError, TypeError, ValueError) as error:  # pydantic's are ValueErrors
            raise WorkflowError(f"verifiers cannot read the environment {told!r:.120}: {_line(error)}") from error

    def _reward(self, config: Any, episode: Any) -> float:
        """What the one trace of the trained model earned."""
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            said = f"{errors[-1].type}: {errors[-1].message}" if errors else "it gives no reason"
            raise WorkflowError(f"the verifiers environment {config.env_id!r} failed: {' '.join(said.split())[:400]}")
        own = [trace for trace in episode.traces if trace.agent.config is None or not _is_elsewhere(config, trace)]
        if len(own) != 1:
            raise WorkflowError(
                f"one agent of a verifiers environment is trained, {config.env_id!r} ran {len(own)}; give the others a "
                "`client` of their own"
            )
        metrics = {name: value for name, value in own[0].metrics.items() if value is not None}
        if metrics:
            stats_tracker.get(workflow_context.stat_scope()).scalar(**metrics)
        return float(own[0].reward)


def _is_elsewhere(config: Any, trace: Any) -> bool:
    """Whether the trace's agent has an endpoint of its own, and so is not the model that is trained."""
    role = getattr(config, trace.agent.name or "", None)
    return getattr(role, "client", None) is not None


def _base_url(extra_kwargs: dict[str, Any]) -> str:
    """From the call, or in a process of its own from the environment."""
    base_url = extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL")
    if not base_url:
        raise WorkflowError("an episode of VerifiersWorkflow needs the base_url of a session; run it with a trainer")
    return str(base_url)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
