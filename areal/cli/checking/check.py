"""A workflow or agent put to the test: its source is read, then it plays alone, with many others, and in a process."""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from areal.api.errors import WorkflowError
from areal.cli.checking.episodes import Task, door_away, door_here, play, play_apart
from areal.cli.checking.findings import Finding, Report, blocked, rejected
from areal.cli.checking.source import read_source
from areal.cli.checking.stage import Stage, open_stage
from areal.cli.checking.unawaited import noticed
from areal.rollout.naming import import_object, name_of
from areal.rollout.subproc_door import AgentPool
from areal.rollout.workflows import WorkflowSpec, agent_function, episode_function, is_agent
from areal.utils.process_pool import CallError, ProcessPool

ALONE, PROCESS = "alone", "in a process"
PROCESSES = 2
LOAD_SECONDS = 240.0
SHARED_STATE = "; alone it passes, so look for state that episodes share"
OTHER_PROCESS = "; a process has no http_client to give, and nothing that another process made (--mode inline skips it)"


async def check(
    spec: WorkflowSpec, tasks: Sequence[Task], *, engine: str, mode: str, episodes: int, seconds: float
) -> Report:
    """Raises WorkflowError for what cannot be found or made at all."""
    agent = is_agent(spec)
    report = Report(name_of(spec.target), "agent" if agent else "workflow", engine, mode, spec.kwargs)
    inline = mode != "subproc" or not agent
    if inline:  # in a process of its own an agent may block as it likes
        report.findings += read_source(_episode_function(spec, agent))
    async with open_stage(engine, tasks) as stage:
        if inline:
            with noticed(report.findings) as dropped:
                await _play_inline(report, spec, tasks, stage, episodes, seconds)
            report.findings += dropped
        if not inline or (agent and mode == "any" and report.passed_alone):
            await _play_away(report, spec, tasks, stage, PROCESSES if inline else episodes, seconds)
        elif not agent and report.passed_alone:
            await _play_apart(report, spec, tasks[0], engine, seconds)
    _remark(report)
    return report


def _episode_function(spec: WorkflowSpec, agent: bool) -> Any:
    """What is called for an episode, found without making the workflow."""
    target = import_object(spec.target, "workflow") if isinstance(spec.target, str) else spec.target
    function = agent_function(target) if agent else episode_function(target)
    return getattr(function, "__call__", function) if isinstance(function, type) else function  # noqa: B004


async def _play_inline(
    report: Report, spec: WorkflowSpec, tasks: Sequence[Task], stage: Stage, episodes: int, seconds: float
) -> None:
    door = door_here(spec, stage)
    known = [finding.where for finding in report.findings]
    alone = await play(ALONE, door, tasks[:1], stage, seconds)
    report.runs.append(alone)
    report.findings += rejected(alone)
    if report.passed_alone:
        alone.stalls.clear()  # the first episode also loads what all need
        together = await play(f"{episodes} at once", door, _many(tasks, episodes), stage, seconds)
        report.runs.append(together)
        report.findings += rejected(together, SHARED_STATE)
    report.findings += blocked([stall for run in report.runs for stall in run.stalls], known)


async def _play_away(
    report: Report, spec: WorkflowSpec, tasks: Sequence[Task], stage: Stage, episodes: int, seconds: float
) -> None:
    async with aclosing(AgentPool(PROCESSES)) as pool:
        try:
            door = await door_away(spec, stage, pool)
        except WorkflowError as error:
            report.picklable = False
            report.findings.append(Finding(str(error), "make in __init__ what cannot travel to another process"))
            return
        report.picklable = True
        run = await play(PROCESS, door, _many(tasks, episodes), stage, seconds)
    report.runs.append(run)
    report.findings += rejected(run, OTHER_PROCESS)


async def _play_apart(report: Report, spec: WorkflowSpec, task: Task, engine: str, seconds: float) -> None:
    with ProcessPool(1, load_seconds=LOAD_SECONDS) as pool:
        try:
            future = pool.submit(
                play_apart, (spec.pack(), engine, task, seconds), timeout_seconds=seconds + LOAD_SECONDS
            )
            run = await asyncio.wrap_future(future)
        except (CallError, WorkflowError) as error:
            report.picklable = False
            report.findings.append(
                Finding(f"in a process of its own: {error}", "make in __init__ what cannot travel to another process")
            )
            return
    report.picklable = True
    report.runs.append(run)
    report.findings += rejected(run, OTHER_PROCESS)


def _remark(report: Report) -> None:
    rewards = [reward for run in report.runs for reward in run.rewards]
    if report.engine == "builtin" and len(rewards) > 1 and len(set(rewards)) == 1:
        report.notes.append(
            f"every reward was {rewards[0]:g}: a group of equal rewards teaches nothing, so look whether the task is "
            "within the model's reach"
        )
    rewrites = sum(run.rewrites for run in report.runs)
    if rewrites:
        report.notes.append(f"the chat template wrote earlier turns anew {rewrites} times; each began a new branch")


def _many(tasks: Sequence[Task], count: int) -> list[Task]:
    return list(itertools.islice(itertools.cycle(tasks), count))
