"""Episodes played for a check, as a rollout worker plays them, and what they left, added up."""

import asyncio
import pickle
import time
from collections.abc import Sequence
from typing import Any

from areal.api.messages import Episode, Rejection
from areal.cli.checking.findings import Played
from areal.cli.checking.stage import STALL_SECONDS, Stage, open_stage
from areal.config.rollout import AgentConfig
from areal.infra.workflow_context import WorkflowContext
from areal.rollout.agent_door import AgentDoor
from areal.rollout.agent_process import AgentParcel
from areal.rollout.constructor import Fillers
from areal.rollout.episodes import Door, run_episode
from areal.rollout.naming import name_of
from areal.rollout.subproc_door import AgentPool, SubprocDoor
from areal.rollout.workflow_door import WorkflowDoor
from areal.rollout.workflows import WorkflowSpec, is_rollout_workflow, load
from areal.trajectory import Tree

Task = dict[str, Any]

SETTLE_SECONDS = STALL_SECONDS / 2
"""The stall watch tells of an end when it looks next."""


def door_here(spec: WorkflowSpec, stage: Stage) -> Door:
    """Its episodes run in this process's event loop."""
    workflow = load(spec, Fillers(stage.gconfig, stage.tokenizer))
    if is_rollout_workflow(workflow):
        return WorkflowDoor(workflow, stage.engine, stage.tokenizer)
    return AgentDoor(workflow, stage.proxy, AgentConfig(), stage.gconfig)


async def door_away(spec: WorkflowSpec, stage: Stage, pool: AgentPool) -> Door:
    """An agent's episodes run in processes of the pool. Raises WorkflowError if it cannot be sent or made there."""
    parcel = AgentParcel(spec.pack(), Fillers(stage.gconfig, stage.tokenizer_path))
    door = SubprocDoor(name_of(spec.target), parcel, pool, stage.proxy, AgentConfig(), stage.gconfig)
    await door.prepare()
    return door


async def play(name: str, door: Door, tasks: Sequence[Task], stage: Stage, seconds: float) -> Played:
    """One episode for each task, all at once."""
    played = Played(name, episodes=len(tasks))
    sessions, stalls = len(stage.proxy.sessions), len(stage.stalls)
    began = time.monotonic()
    packed = [pickle.dumps(task) for task in tasks]  # an agent may change its task, and only its own
    outcomes = await asyncio.gather(
        *(_episode(door, pickle.loads(task), number, seconds) for number, task in enumerate(packed))
    )
    played.seconds = time.monotonic() - began
    await asyncio.sleep(SETTLE_SECONDS)
    for outcome in outcomes:
        _count(played, outcome)
    for session in stage.proxy.sessions[sessions:]:
        _count_tree(played, session.tree)
    played.calls = max(played.calls, played.completions)  # a rejection tells of no calls; an agent's are in its tree
    played.stalls = stage.stalls[stalls:]
    return played


def play_apart(spec: bytes, engine: str, task: Task, seconds: float) -> Played:
    """One episode of a RolloutWorkflow in a process of its own, with an engine of its own."""

    async def episode() -> Played:
        async with open_stage(engine, [task]) as stage:
            return await play("in a process", door_here(WorkflowSpec.unpack(spec), stage), [task], stage, seconds)

    return asyncio.run(episode())


async def _episode(door: Door, task: Task, number: int, seconds: float) -> Episode | Rejection:
    context = WorkflowContext(task_id=number, workflow=door.name)
    outcome, _ = await run_episode(door, task, context, greedy=False, seconds=seconds)
    return outcome


def _count(played: Played, outcome: Episode | Rejection) -> None:
    if isinstance(outcome, Rejection):
        played.rejections.append(outcome)
        return
    played.accepted += 1
    played.calls += outcome.calls
    played.rewards.append(outcome.reward)
    for row in outcome.rows:
        sampled = int(row.loss_mask.sum())
        played.completion_tokens += sampled
        played.prompt_tokens += len(row.input_ids) - sampled


def _count_tree(played: Played, tree: Tree) -> None:
    nodes = tree.completions
    played.completions += len(nodes)
    played.rewarded += sum(node.reward is not None for node in nodes)
    played.rewrites += tree.rewrites
    # Every completion continues one of its own or begins a conversation; the first to do so is no fork.
    played.forks += len(nodes) - len({node.parent for node in nodes})
