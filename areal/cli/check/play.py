"""Episodes played for a check as a rollout worker plays them, and what is watched meanwhile.

A harness is an engine, the proxy in front of it, and a watch for code that holds the event loop for long. What blocks
only briefly, a reward function called in the event loop and a coroutine that is never awaited are found by
`MistakeWatch`, which looks at calls as they are made and reads no source.
"""

import asyncio
import gc
import inspect
import pickle
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self, SupportsIndex

from areal.api.engine_api import InferenceEngine
from areal.api.errors import RejectReason
from areal.api.messages import Episode, Rejection, Stall
from areal.api.reward_api import AsyncRewardWrapper
from areal.cli.check.report import Finding, PlayedEpisodes
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.infra import workflow_context
from areal.infra.blocking_calls import by_name, remedy_for
from areal.infra.stalls import INSTALLED, Callback, StallWatch, callback_of, is_user_code, short_file
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import NO_SESSION_KEY, Proxy, Session
from areal.rollout.episodes import Runner, call, run_episode
from areal.rollout.loading import Fillers, WorkflowSpec, import_object, is_rollout_workflow, load
from areal.rollout.runners import AgentPool, RunnerParts, make_runner
from areal.rollout.runners.agent import AgentRunner, environment
from areal.rollout.runners.workflow import WorkflowRunner
from areal.trajectory import Tree
from areal.utils.callables import is_async
from areal.utils.closing import Closing
from areal.utils.wire import Wire

BUILTIN = "builtin:tiny-math"
MAX_NEW_TOKENS = 64
STALL_SECONDS = 0.2
"""Shorter than in training, where a report costs attention."""
SETTLE_SECONDS = STALL_SECONDS / 2
"""The stall watch reports the end of a stall when it looks next."""
STUCK_SECONDS = 5.0
"""Code that blocks for this long waits for the very event loop it blocks, or might as well."""
FAKE_VOCABULARY = 400
FAKE_POSITIONS = 32_768

Task = dict[str, Any]


class WatchedProxy(Proxy):
    """Keeps every session that was opened, for its tree."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sessions: list[Session] = []

    def open_session(self, **options: Any) -> Session:
        session = super().open_session(**options)
        self.sessions.append(session)
        return session


@dataclass
class Harness:
    engine: InferenceEngine
    tokenizer: Any
    tokenizer_path: str
    proxy: WatchedProxy
    gconfig: GenerationHyperparameters
    stalls: list[Stall] = field(default_factory=list)
    """Those that have ended."""


@asynccontextmanager
async def open_harness(kind: str, tasks: Sequence[Task]) -> AsyncIterator[Harness]:
    """`kind` is builtin or fake; the fake engine's tokenizer is made of the tasks' own text."""
    with tempfile.TemporaryDirectory(prefix="areal-check-") as place:
        engine, tokenizer, path, positions = _builtin() if kind == "builtin" else _fake(tasks, Path(place))
        gconfig = GenerationHyperparameters(max_new_tokens=MAX_NEW_TOKENS)
        proxy = WatchedProxy(engine, tokenizer, gconfig=gconfig, max_positions=positions)
        await proxy.start()
        harness = Harness(engine, tokenizer, path, proxy, gconfig)
        no_session = {"OPENAI_BASE_URL": f"{proxy.origin}/v1", "OPENAI_API_KEY": NO_SESSION_KEY}
        watch = StallWatch(
            STALL_SECONDS,
            lambda stall: None,
            harness.stalls.append,
            limit_seconds=STUCK_SECONDS,
            entries=(call.__code__,),
        )
        watch.start()
        try:
            with environment(no_session):
                yield harness
        finally:
            watch.close()
            await proxy.aclose()
            await workflow_context.close_clients()
            await engine.aclose()


def _builtin() -> tuple[InferenceEngine, Any, str, int]:
    from areal.engine.inference.server import load_engine
    from areal.engine.models import find_model, max_positions
    from areal.utils.hf_utils import load_hf_tokenizer

    directory = find_model(BUILTIN)
    return load_engine(directory), load_hf_tokenizer(directory), str(directory), max_positions(directory)


def _fake(tasks: Sequence[Task], place: Path) -> tuple[InferenceEngine, Any, str, int]:
    from areal.engine.builtin.tokenizer import make_tokenizer
    from areal.engine.inference.fake import FakeEngine
    from areal.utils.hf_utils import load_hf_tokenizer

    make_tokenizer([str(task) for task in tasks], FAKE_VOCABULARY, FAKE_POSITIONS).save_pretrained(place)
    tokenizer = load_hf_tokenizer(place)
    engine = FakeEngine(vocab_size=len(tokenizer), max_positions=FAKE_POSITIONS, tokenizer=tokenizer)
    return engine, tokenizer, str(place), FAKE_POSITIONS


def inline_runner(spec: WorkflowSpec, harness: Harness, watch: "MistakeWatch | None" = None) -> Runner:
    """Runs episodes in this process's event loop."""
    workflow = load(spec, Fillers(harness.gconfig, harness.tokenizer))
    if watch is not None:
        watch.watch_reward(workflow, spec.kwargs.get("reward_fn"))
    if is_rollout_workflow(workflow):
        return WorkflowRunner(workflow, harness.engine, harness.tokenizer)
    return AgentRunner(workflow, harness.proxy, AgentConfig(), harness.gconfig)


async def subprocess_runner(spec: WorkflowSpec, harness: Harness, pool: AgentPool) -> Runner:
    """Runs an agent's episodes in the pool. Raises WorkflowError if the agent cannot be sent or made there."""
    parts = RunnerParts(
        proxy=harness.proxy,
        engine=harness.engine,
        agent=AgentConfig(),
        fillers=Fillers(harness.gconfig, harness.tokenizer),
        tokenizer_path=harness.tokenizer_path,
        pool=pool,
    )
    return await make_runner(spec.pack(), "subproc", parts)


async def play_episodes(
    name: str, runner: Runner, tasks: Sequence[Task], harness: Harness, seconds: float
) -> PlayedEpisodes:
    """One episode for each task, all at once."""
    played = PlayedEpisodes(name, episodes=len(tasks))
    sessions, stalls = len(harness.proxy.sessions), len(harness.stalls)
    began = time.monotonic()
    packed = [pickle.dumps(task) for task in tasks]  # an agent may change its task, and only its own
    outcomes = await asyncio.gather(
        *(_episode(runner, pickle.loads(task), number, seconds) for number, task in enumerate(packed))
    )
    played.seconds = time.monotonic() - began
    await asyncio.sleep(SETTLE_SECONDS)
    for outcome in outcomes:
        _count(played, outcome)
    for session in harness.proxy.sessions[sessions:]:
        _count_tree(played, session.tree)
    played.calls = max(played.calls, played.completions)  # a rejection counts no calls; an agent's are in its tree
    played.stalls = harness.stalls[stalls:]
    return played


OWN_PROCESS_WIRE = Wire((PlayedEpisodes, Rejection, RejectReason, Stall))
"""How what was played comes back from a process of its own: as data, since it ran the user's code."""


def play_in_own_harness(spec: bytes, engine: str, task: Task, seconds: float) -> bytes:
    """One episode of a RolloutWorkflow, packed by OWN_PROCESS_WIRE; runs in a process of its own."""

    async def episode() -> PlayedEpisodes:
        async with open_harness(engine, [task]) as harness:
            runner = inline_runner(WorkflowSpec.unpack(spec), harness)
            return await play_episodes("in a process", runner, [task], harness, seconds)

    return OWN_PROCESS_WIRE.pack(asyncio.run(episode()))


async def _episode(runner: Runner, task: Task, number: int, seconds: float) -> Episode | Rejection:
    context = WorkflowContext(task_id=number, workflow=runner.name)
    outcome, _ = await run_episode(runner, task, context, greedy=False, seconds=seconds)
    return outcome


def _count(played: PlayedEpisodes, outcome: Episode | Rejection) -> None:
    if isinstance(outcome, Rejection):
        played.rejections.append(outcome)
        return
    played.accepted += 1
    played.calls += outcome.calls
    played.rewards.append(outcome.reward)
    played.completion_tokens += outcome.trained_tokens
    played.prompt_tokens += sum(len(row.input_ids) for row in outcome.rows) - outcome.trained_tokens


def _count_tree(played: PlayedEpisodes, tree: Tree) -> None:
    nodes = tree.completions
    played.completions += len(nodes)
    played.rewarded += sum(node.reward is not None for node in nodes)
    played.rewrites += tree.rewrites
    # Every completion continues a completion or begins a conversation; the first to do so is not a fork.
    played.forks += len(nodes) - len({node.parent for node in nodes})


_BLOCKING_EVENTS = {
    "open": "open",
    "os.system": "os.system",
    "subprocess.Popen": "subprocess.run",
    "time.sleep": "time.sleep",
    "builtins.input": "input",
    "socket.connect": "",
    "socket.getaddrinfo": "",
}
"""Audit events of calls that wait, and their names in the table of remedies; the network's depend on the library."""
_OWN_CALLS = {"open", "os.system", "subprocess.Popen"}
"""Those that count only where the user's code makes the call itself: libraries read their own settings once."""
_OTHERS_CALLS = {"asyncio", "linecache"}
"""Modules of the standard library whose calls are not the user's: one does not block, one reads source for warnings."""
_NEVER_AWAITED = "coroutine .* was never awaited"
_ORIGIN_FRAMES = 8
"""How many callers of a coroutine function are remembered: decorators of SDKs come before the user's line."""
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


class MistakeWatch(Closing):
    """Watches the user's code in the event loop of the thread that makes it, for the length of a `with` block."""

    def __init__(self) -> None:
        self._found: dict[str, Finding] = {}
        self._thread_id: int | None = threading.get_ident()
        self._undo = ExitStack()
        self._warnings: list[warnings.WarningMessage] = []

    @property
    def findings(self) -> list[Finding]:
        """One for each line of code."""
        return list(self._found.values())

    def __enter__(self) -> Self:
        caught = self._undo.enter_context(warnings.catch_warnings(record=True))
        assert caught is not None, "record=True gives a list"
        self._warnings = caught
        warnings.filterwarnings("always", _NEVER_AWAITED, RuntimeWarning)
        self._undo.callback(sys.set_coroutine_origin_tracking_depth, sys.get_coroutine_origin_tracking_depth())
        sys.set_coroutine_origin_tracking_depth(_ORIGIN_FRAMES)
        self._undo.enter_context(_audited_sleep())
        sys.addaudithook(self._audit)
        return self

    def close(self) -> None:
        self._thread_id = None  # an audit hook cannot be removed
        gc.collect()  # a coroutine that is kept alive by a traceback is reported when it is freed
        self._undo.close()
        for warning in self._warnings:
            if not inspect.iscoroutine(warning.source):
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
            elif (finding := _never_awaited(warning.source)) is not None:
                self._add(finding)

    def watch_reward(self, workflow: Any, reward_fn: Any) -> None:
        """Notice calls of the reward function that a workflow keeps as an attribute without a wrapper.

        `reward_fn` is what its constructor was given; an attribute of that name counts in any case.
        """
        given = import_object(reward_fn, "reward_fn") if isinstance(reward_fn, str) and reward_fn else reward_fn
        attributes: dict[str, Any] = getattr(workflow, "__dict__", {})
        for name, value in list(attributes.items()):
            if not callable(value) or isinstance(value, AsyncRewardWrapper) or is_async(value):
                continue
            if name == "reward_fn" or value is given:
                attributes[name] = self._watched(name, value)
                self._undo.callback(attributes.__setitem__, name, value)

    def _watched(self, name: str, reward_fn: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            callback = self._callback(sys._getframe(1))
            place = callback.blame((call.__code__,)) if callback else None
            if place is not None:
                remedy = f"self.{name} = AsyncRewardWrapper(reward_fn) in __init__, and await it"
                self._add(Finding(f"{place.source} runs the reward function in the event loop", remedy, place.where))
            return reward_fn(*args, **kwargs)

        return watched

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _BLOCKING_EVENTS or (callback := self._callback(sys._getframe(1))) is None:
            return
        if callback.is_importing or _is_harmless(event, arguments, callback):
            return
        place = callback.blame((call.__code__,))
        if place is None:
            return
        known = by_name(_BLOCKING_EVENTS[event])
        modules = [str(frame.f_globals.get("__name__")) for frame in callback.stack]
        remedy = known.remedy if known else remedy_for("", modules)
        what = f"{place.source or place.function} blocks the event loop, and with it every other episode"
        self._add(Finding(what, f"use {remedy}", place.where))

    def _callback(self, frame: FrameType) -> Callback | None:
        """What the event loop is running, if `frame` belongs to its thread."""
        return callback_of(frame) if threading.get_ident() == self._thread_id else None

    def _add(self, finding: Finding) -> None:
        self._found.setdefault(finding.where, finding)


def _is_harmless(event: str, arguments: tuple[Any, ...], callback: Callback) -> bool:
    if event == "open" and isinstance(arguments[0], int):
        return True  # a file that is open already
    if event == "socket.connect" and arguments[0].gettimeout() == 0:
        return True  # a connection that asyncio waits for
    return event in _OWN_CALLS and not _is_own_call(callback)


def _is_own_call(callback: Callback) -> bool:
    """Whether nothing but the standard library lies between a call and the user's code."""
    for frame in reversed(callback.stack):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if is_user_code(file):
            return True
        if module.partition(".")[0] in _OTHERS_CALLS or not _is_standard_library(file):
            return False
    return False


def _is_standard_library(file: str) -> bool:
    return file.startswith("<frozen ") or (
        file.startswith(_STANDARD_LIBRARY) and not any(name in Path(file).parts for name in INSTALLED)
    )


@contextmanager
def _audited_sleep() -> Iterator[None]:
    """`time.sleep` raises an audit event of its own only since Python 3.13."""
    sleep = time.sleep

    def audited_sleep(seconds: float | SupportsIndex, /) -> None:
        sys.audit("time.sleep", seconds)
        sleep(seconds)

    time.sleep = audited_sleep
    try:
        yield
    finally:
        time.sleep = sleep


def _never_awaited(coroutine: Any) -> Finding | None:
    """None for one that a library made for itself."""
    name = coroutine.cr_code.co_qualname.removesuffix(".__call__")
    is_private = name.rpartition(".")[2].startswith("_") and not is_user_code(coroutine.cr_code.co_filename)
    made_at = next(
        (f"{short_file(file)}:{line}" for file, line, _ in coroutine.cr_origin or () if is_user_code(file)), ""
    )
    if is_private or not made_at:
        return None
    return Finding(f"{name}(...) is never awaited, so it never runs", f"await {name}(...)", made_at)
