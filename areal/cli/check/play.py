"""What checked episodes play on: an engine, the proxy in front of it, and a watch over the event loop."""

# MERGED-DOC
# Episodes played for a check, as a rollout worker plays them, and what they left, added up.
# A workflow or agent put to the test: its source is read, then it plays alone, with many others, and in a process.

import asyncio
import itertools
import pickle
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import WorkflowError
from areal.api.messages import Episode, Rejection, Stall
from areal.cli.check.report import Finding, PlayedEpisodes, Report, blocked, rejected
from areal.cli.check.source import noticed, read_source
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.infra import workflow_context
from areal.infra.stalls import StallWatch
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import NO_SESSION_KEY, Proxy, Session
from areal.rollout.episodes import Runner, call, run_episode
from areal.rollout.loading import (
    Fillers,
    WorkflowSpec,
    agent_function,
    episode_function,
    import_object,
    is_agent,
    is_rollout_workflow,
    load,
)
from areal.rollout.runners.agent import AgentRunner, environment
from areal.rollout.runners.subprocess import AgentParcel, AgentPool, SubprocessRunner
from areal.rollout.runners.workflow import WorkflowRunner
from areal.trajectory import Tree
from areal.utils.callables import name_of
from areal.utils.process_pool.pool import CallError, ProcessPool

ENGINES = ("builtin", "fake")
BUILTIN = "builtin:tiny-math"
MAX_NEW_TOKENS = 64
STALL_SECONDS = 0.2
"""Shorter than in training, where a report costs attention."""
STUCK_SECONDS = 5.0
"""What blocks for so long waits for the event loop it blocks, or might as well."""
FAKE_VOCABULARY = 400
FAKE_POSITIONS = 32_768


class WatchedProxy(Proxy):
    """Keeps every session that was opened, for its tree."""

    sessions: list[Session]

    def open_session(self, **options: Any) -> Session:
        session = super().open_session(**options)
        self.sessions.append(session)
        return session


@dataclass
class Stage:
    engine: InferenceEngine
    tokenizer: Any
    tokenizer_path: str
    proxy: WatchedProxy
    gconfig: GenerationHyperparameters
    stalls: list[Stall] = field(default_factory=list)
    """Those that have ended."""

    def watch(self) -> StallWatch:
        return StallWatch(
            STALL_SECONDS,
            lambda stall: None,
            self.stalls.append,
            limit_seconds=STUCK_SECONDS,
            entries=(call.__code__,),
        )


@asynccontextmanager
async def open_stage(kind: str, tasks: Sequence[dict[str, Any]]) -> AsyncIterator[Stage]:
    """`kind` is one of ENGINES; the fake one's tokenizer is made of the tasks' own text."""
    with tempfile.TemporaryDirectory(prefix="areal-check-") as place:
        engine, tokenizer, path, positions = _builtin() if kind == "builtin" else _fake(tasks, Path(place))
        gconfig = GenerationHyperparameters(max_new_tokens=MAX_NEW_TOKENS)
        proxy = WatchedProxy(engine, tokenizer, gconfig=gconfig, max_positions=positions)
        proxy.sessions = []
        await proxy.start()
        stage = Stage(engine, tokenizer, path, proxy, gconfig)
        nowhere = {"OPENAI_BASE_URL": f"{proxy.origin}/v1", "OPENAI_API_KEY": NO_SESSION_KEY}
        watch = stage.watch()
        watch.start()
        try:
            with environment(nowhere):
                yield stage
        finally:
            watch.close()
            await proxy.aclose()
            await workflow_context.close_clients()
            await engine.aclose()


def _builtin() -> tuple[InferenceEngine, Any, str, int]:
    from areal.engine.inference.server import load_engine
    from areal.engine.model.architecture import read_architecture
    from areal.engine.models import find_model
    from areal.utils.hf_utils import load_hf_tokenizer

    directory = find_model(BUILTIN)
    positions = read_architecture(directory).max_positions
    return load_engine(directory), load_hf_tokenizer(directory), str(directory), positions


def _fake(tasks: Sequence[dict[str, Any]], place: Path) -> tuple[InferenceEngine, Any, str, int]:
    from areal.engine.builtin.tokenizer import make_tokenizer
    from areal.engine.inference.fake import FakeEngine
    from areal.utils.hf_utils import load_hf_tokenizer

    make_tokenizer([str(task) for task in tasks], FAKE_VOCABULARY, FAKE_POSITIONS).save_pretrained(place)
    tokenizer = load_hf_tokenizer(place)
    engine = FakeEngine(vocab_size=len(tokenizer), max_positions=FAKE_POSITIONS, tokenizer=tokenizer)
    return engine, tokenizer, str(place), FAKE_POSITIONS


Task = dict[str, Any]

SETTLE_SECONDS = STALL_SECONDS / 2
"""The stall watch tells of an end when it looks next."""


def door_here(spec: WorkflowSpec, stage: Stage) -> Runner:
    """Its episodes run in this process's event loop."""
    workflow = load(spec, Fillers(stage.gconfig, stage.tokenizer))
    if is_rollout_workflow(workflow):
        return WorkflowRunner(workflow, stage.engine, stage.tokenizer)
    return AgentRunner(workflow, stage.proxy, AgentConfig(), stage.gconfig)


async def door_away(spec: WorkflowSpec, stage: Stage, pool: AgentPool) -> Runner:
    """An agent's episodes run in processes of the pool. Raises WorkflowError if it cannot be sent or made there."""
    parcel = AgentParcel(spec.pack(), Fillers(stage.gconfig, stage.tokenizer_path))
    door = SubprocessRunner(name_of(spec.target), parcel, pool, stage.proxy, AgentConfig(), stage.gconfig)
    await door.prepare()
    return door


async def play(name: str, door: Runner, tasks: Sequence[Task], stage: Stage, seconds: float) -> PlayedEpisodes:
    """One episode for each task, all at once."""
    played = PlayedEpisodes(name, episodes=len(tasks))
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


def play_apart(spec: bytes, engine: str, task: Task, seconds: float) -> PlayedEpisodes:
    """One episode of a RolloutWorkflow in a process of its own, with an engine of its own."""

    async def episode() -> PlayedEpisodes:
        async with open_stage(engine, [task]) as stage:
            return await play("in a process", door_here(WorkflowSpec.unpack(spec), stage), [task], stage, seconds)

    return asyncio.run(episode())


async def _episode(door: Runner, task: Task, number: int, seconds: float) -> Episode | Rejection:
    context = WorkflowContext(task_id=number, workflow=door.name)
    outcome, _ = await run_episode(door, task, context, greedy=False, seconds=seconds)
    return outcome


def _count(played: PlayedEpisodes, outcome: Episode | Rejection) -> None:
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


def _count_tree(played: PlayedEpisodes, tree: Tree) -> None:
    nodes = tree.completions
    played.completions += len(nodes)
    played.rewarded += sum(node.reward is not None for node in nodes)
    played.rewrites += tree.rewrites
    # Every completion continues one of its own or begins a conversation; the first to do so is no fork.
    played.forks += len(nodes) - len({node.parent for node in nodes})


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
