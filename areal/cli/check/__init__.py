"""`areal check my_module.MyAgent --data sample.jsonl`: find what would go wrong in training, in seconds.

Plays the workflow or agent alone, then many times at once, then in another process. Ends with 0 if nothing was found, 1
with findings, 2 if there is nothing to check.
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from rich.console import Console

from areal.api.errors import ConfigError, WorkflowError
from areal.cli.check.play import (
    OWN_PROCESS_WIRE,
    Harness,
    MistakeWatch,
    Task,
    inline_runner,
    open_harness,
    play_episodes,
    play_in_own_harness,
    subprocess_runner,
)
from areal.cli.check.report import Finding, Report, rejection_findings, show, stall_findings
from areal.config.experiment import DatasetConfig
from areal.config.yaml import Verbatim
from areal.dataset import get_custom_dataset
from areal.rollout.loading import WorkflowSpec, is_agent
from areal.rollout.loading import check as refuse_early
from areal.rollout.runners import AgentPool
from areal.trainer.display import waiting
from areal.utils import garbage
from areal.utils.callables import name_of
from areal.utils.process_pool.pool import CallError, ProcessPool

FOUND = 1
PROCESSES = 2
LOAD_SECONDS = 240.0
SHARED_STATE = "; alone it passes, so look for state that episodes share"
OTHER_PROCESS = "; a process has no http_client to give, and nothing that another process made (--mode inline skips it)"
CANNOT_TRAVEL = "make in __init__ what cannot be sent to another process"


def run(args: argparse.Namespace) -> int:
    if args.n < 1:
        raise ConfigError(f"--n must be >= 1 episodes at once, got {args.n}")
    if args.timeout <= 0:
        raise ConfigError(f"--timeout must be > 0 seconds, got {args.timeout:g}")
    spec = WorkflowSpec(args.workflow, _constructor_arguments(args.arguments))
    refuse_early(spec)
    tasks = get_custom_dataset("train", DatasetConfig(path=args.data))[: args.n]
    playing = check(spec, tasks, engine=args.engine, mode=args.mode, episodes=args.n, seconds=args.timeout)
    with waiting(f"playing {args.workflow}"):
        report = asyncio.run(playing)
    if args.json:
        print(json.dumps({**asdict(report), "passed": report.passed}, indent=2), file=args.stdout)
    else:
        show(report, Console(highlight=False))
    return 0 if report.passed else FOUND


def _constructor_arguments(words: list[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in words]
    wrong = [name for name, equals, _ in pairs if not equals or not name.isidentifier()]
    if wrong:
        raise ConfigError(f"constructor arguments are written NAME=VALUE, got {wrong[0]!r}")
    return {name: Verbatim(text).parsed() for name, _, text in pairs}


async def check(
    spec: WorkflowSpec, tasks: Sequence[Task], *, engine: str, mode: str, episodes: int, seconds: float
) -> Report:
    """Raises WorkflowError for what cannot be found or made at all."""
    agent = is_agent(spec)
    report = Report(name_of(spec.target), "agent" if agent else "workflow", engine, mode, spec.kwargs)
    inline = mode != "subproc" or not agent
    async with open_harness(engine, tasks) as harness:
        if inline:
            await _play_inline(report, spec, tasks, harness, episodes, seconds)
        if not inline or (agent and mode == "any" and report.passed_alone):
            await _play_in_pool(report, spec, tasks, harness, PROCESSES if inline else episodes, seconds)
        elif not agent and report.passed_alone:
            await _play_in_process(report, spec, tasks[0], engine, seconds)
    _add_notes(report)
    return report


async def _play_inline(
    report: Report, spec: WorkflowSpec, tasks: Sequence[Task], harness: Harness, episodes: int, seconds: float
) -> None:
    """Alone and many at once, in this process's event loop."""
    with MistakeWatch() as watch:
        runner = inline_runner(spec, harness, watch)
        alone = await play_episodes("alone", runner, tasks[:1], harness, seconds)
        report.runs.append(alone)
        report.findings += rejection_findings(alone)
        if report.passed_alone:
            alone.stalls.clear()  # the first episode also loads what all need
            with garbage.settled():  # as in a rollout worker: a collection of everything takes as long as a stall
                at_once = _repeated(tasks, episodes)
                together = await play_episodes(f"{episodes} at once", runner, at_once, harness, seconds)
            report.runs.append(together)
            report.findings += rejection_findings(together, SHARED_STATE)
    report.findings += watch.findings
    known = {finding.where for finding in watch.findings}
    report.findings += stall_findings([stall for run in report.runs for stall in run.stalls], known)


async def _play_in_pool(
    report: Report, spec: WorkflowSpec, tasks: Sequence[Task], harness: Harness, episodes: int, seconds: float
) -> None:
    """An agent's episodes, in processes as with rollout.agent.mode=subproc."""
    async with aclosing(AgentPool(PROCESSES)) as pool:
        try:
            runner = await subprocess_runner(spec, harness, pool)
        except WorkflowError as error:
            report.picklable = False
            report.findings.append(Finding(str(error), CANNOT_TRAVEL))
            return
        report.picklable = True
        played = await play_episodes("in a process", runner, _repeated(tasks, episodes), harness, seconds)
    report.runs.append(played)
    report.findings += rejection_findings(played, OTHER_PROCESS)


async def _play_in_process(report: Report, spec: WorkflowSpec, task: Task, engine: str, seconds: float) -> None:
    """An episode of a RolloutWorkflow, in a process with an engine of its own."""
    with ProcessPool(1, load_seconds=LOAD_SECONDS) as pool:
        try:
            arguments = (spec.pack(), engine, task, seconds)
            future = pool.submit(play_in_own_harness, arguments, timeout_seconds=seconds + LOAD_SECONDS)
            played = OWN_PROCESS_WIRE.unpack(await asyncio.wrap_future(future))
        except (CallError, WorkflowError) as error:
            report.picklable = False
            report.findings.append(Finding(f"in a process: {error}", CANNOT_TRAVEL))
            return
    report.picklable = True
    report.runs.append(played)
    report.findings += rejection_findings(played, OTHER_PROCESS)


def _repeated(tasks: Sequence[Task], count: int) -> list[Task]:
    return list(itertools.islice(itertools.cycle(tasks), count))


def _add_notes(report: Report) -> None:
    rewards = [reward for run in report.runs for reward in run.rewards]
    if report.engine == "builtin" and len(rewards) > 1 and len(set(rewards)) == 1:
        report.notes.append(
            f"every reward was {rewards[0]:g}: a group of equal rewards teaches nothing, so check that the task is "
            "within the model's reach"
        )
    rewrites = sum(run.rewrites for run in report.runs)
    if rewrites:
        report.notes.append(f"the chat template changed earlier turns {rewrites} times; each began a new branch")
