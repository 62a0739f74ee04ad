"""Ways to run episodes, one file per way: an agent in this process, in processes of its own or outside this system,
and a workflow that calls the engine itself. Each is a `Runner`; `make_runner` chooses."""

from dataclasses import dataclass, replace
from typing import Literal

from areal.api.engine_api import InferenceEngine
from areal.config.rollout import AgentConfig
from areal.proxy import Proxy
from areal.rollout.episodes import Runner
from areal.rollout.loading import Fillers, WorkflowSpec, is_agent, is_rollout_workflow, load
from areal.rollout.runners.agent import AgentRunner
from areal.rollout.runners.online import OnlineRunner
from areal.rollout.runners.subprocess import AgentPool, PackedAgent, SubprocessRunner
from areal.rollout.runners.workflow import WorkflowRunner
from areal.trajectory.tensors import UNLIMITED, RowLimits
from areal.utils.callables import name_of

__all__ = ["AgentPool", "RunnerParts", "make_runner"]


@dataclass(frozen=True)
class RunnerParts:
    """What a rollout worker makes its runners of."""

    proxy: Proxy
    """It must be running."""
    engine: InferenceEngine
    agent: AgentConfig
    fillers: Fillers
    tokenizer_path: str
    pool: AgentPool | None = None
    """Needed for mode subproc."""
    log_admin_key: bool = True
    """False = the user chose the key, so the log of mode online must not show it."""
    limits: RowLimits = UNLIMITED


async def make_runner(workflow: bytes, mode: Literal["inline", "subproc", "online"], parts: RunnerParts) -> Runner:
    """`workflow` is a packed `WorkflowSpec`; raises WorkflowError if it cannot be made. `mode` is for agents: a
    RolloutWorkflow always runs in this process."""
    spec = WorkflowSpec.unpack(workflow)
    fillers, gconfig, name = parts.fillers, parts.fillers.gconfig, name_of(spec.target)
    if mode == "online" and is_agent(spec):
        online = OnlineRunner(name, parts.proxy, parts.agent, gconfig)
        online.announce(with_key=parts.log_admin_key)
        return online
    if mode == "subproc" and is_agent(spec):
        assert parts.pool is not None, "mode subproc needs a pool"
        path = parts.tokenizer_path
        paths = replace(fillers, tokenizer=path, processor=None if fillers.processor is None else path)
        agent = PackedAgent(workflow, paths)
        runner = SubprocessRunner(name, agent, parts.pool, parts.proxy, parts.agent, gconfig)
        await runner.prepare()
        return runner
    made = load(spec, fillers)
    if is_rollout_workflow(made):
        return WorkflowRunner(made, parts.engine, fillers.tokenizer, parts.limits)
    return AgentRunner(made, parts.proxy, parts.agent, gconfig)
