"""One episode, whichever way it is run, ends as an `Episode` or as a `Rejection` with its reason.

Calls code that is not ours under a deadline, in a thread if it blocks. Whatever such code does (raise, hang, exit,
swallow its cancellation) ends as a result or as an `EpisodeRejected`.
"""

import asyncio
import inspect
import textwrap
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from areal.api.errors import AgentFailed, EpisodeRejected, EpisodeTimeout, RejectReason
from areal.api.io_struct import cannot_train
from areal.api.messages import Episode, Rejection
from areal.infra.stalls import LoopBlocked
from areal.infra.status import line_of_task
from areal.infra.workflow_context import WorkflowContext
from areal.utils import stats_tracker, waits
from areal.utils.background import in_thread
from areal.utils.callables import is_async
from areal.utils.logging import getLogger

GRACE_SECONDS = 5.0
"""How long cancelled code may take to end before it is abandoned."""
DETAIL_CHARACTERS = 500
TIMEOUT_SETTING = "rollout.agent.timeout_seconds"

Digests = dict[int, str]
"""The weights that an episode was sampled with: version -> digest."""

logger = getLogger("rollout")


class Runner(Protocol):
    """A way to run episodes of one workflow."""

    name: str
    """What messages call the workflow."""

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
    ) -> tuple[Episode | None, Digests]:
        """Run user code to its end, or to its deadline; None = it rejected the episode itself."""
        ...


async def run_episode(
    runner: Runner, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
) -> tuple[Episode | Rejection, Digests]:
    """Raises nothing unless it is cancelled from outside: an episode fails alone."""
    began = time.monotonic()
    try:
        with stats_tracker.collect() as stats:
            episode, digests = await runner.play(data, context, greedy=greedy, seconds=seconds)
            if episode is not None and not context.is_eval:
                _require_trainable(episode, runner.name)
    except EpisodeRejected as error:
        return _rejection(error), {}
    except Exception as error:
        failed = AgentFailed(f"{runner.name}: the episode failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        return _rejection(failed), {}
    if episode is None:
        return Rejection(RejectReason.FILTERED, f"{runner.name} returned None"), digests
    episode.stats = stats.means()
    episode.seconds = time.monotonic() - began
    episode.turns = [(asked - began, answered - began, tokens) for asked, answered, tokens in episode.turns]
    for node in episode.nodes:
        node.asked, node.answered = node.asked - began, node.answered - began
    return episode, digests


def _require_trainable(episode: Episode, name: str) -> None:
    """Raises AgentFailed for an answer whose log-probs the trainer cannot compute."""
    for row in episode.rows:
        for choices in row.choices:
            if choices.unreported:
                raise AgentFailed(f"{name} asked for top_p or top_k: {cannot_train(choices)}")


def _rejection(error: EpisodeRejected) -> Rejection:
    detail = textwrap.shorten(str(error), DETAIL_CHARACTERS, placeholder=" …")
    return Rejection(error.reason, detail, user_trace(error.__cause__))


def user_trace(cause: BaseException | None) -> str:
    """The traceback in the user's code; that of an error raised in another process came as text."""
    if cause is None:
        return ""
    return getattr(cause, "trace", "") or "".join(traceback.format_exception(cause))


Start = Callable[[], Coroutine[Any, Any, Any]]


async def bounded(start: Start, seconds: float, name: str, *, grace_seconds: float = GRACE_SECONDS) -> Any:
    """What `start()` returns; raises `AgentFailed` with what it raised as cause, or `EpisodeTimeout` at the deadline.

    It runs in a task of its own, so that code which ignores its cancellation cannot hold the caller.
    """
    task = asyncio.ensure_future(_contained(start))
    try:
        with waits.current().entered("runs its own code", seconds, TIMEOUT_SETTING, lambda: line_of_task(task)):
            await _until_done(task, seconds)
    except asyncio.CancelledError:
        await _stop(task, name, grace_seconds)
        raise
    if task.done():
        return _outcome(task, name)
    where = await _stop(task, name, grace_seconds)
    raise EpisodeTimeout(f"{name} took longer than {TIMEOUT_SETTING}={seconds:g}") from where


async def _until_done(task: asyncio.Task[Any], seconds: float) -> None:
    """`asyncio.wait` for one task, which every episode pays for, without its sets and checks."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end(_: object = None) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(end)
    deadline = loop.call_later(seconds, end)
    try:
        await ended
    finally:
        deadline.cancel()
        task.remove_done_callback(end)


async def _contained(start: Start) -> Any:
    """A task that ends by SystemExit ends its event loop too; this one does not."""
    try:
        return await start()
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


async def _stop(task: asyncio.Task[Any], name: str, grace_seconds: float) -> BaseException | None:
    """Cancel it and wait a little; returns the error it ended with, whose traceback says where it was."""
    task.cancel()
    await asyncio.wait((task,), timeout=grace_seconds)
    if not task.done():
        logger.warning("%s ignores its cancellation and is abandoned; let CancelledError pass", name)
        task.add_done_callback(_retrieve)
        return None
    return _retrieve(task)


def _retrieve(task: asyncio.Task[Any]) -> BaseException | None:
    try:
        return task.exception()
    except asyncio.CancelledError as error:
        return error


def _outcome(task: asyncio.Task[Any], name: str) -> Any:
    try:
        return task.result()
    except EpisodeRejected:
        raise
    except LoopBlocked as error:
        raise EpisodeTimeout(f"{name} {error}; await what waits, or set rollout.agent.mode=subproc") from error
    except (Exception, asyncio.CancelledError) as error:  # it cancelled itself
        raise AgentFailed(f"{name} raised {type(error).__name__}: {error}") from error


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that may be asynchronous or not; one that is not runs in a thread."""
    if is_async(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def accepted_keywords(function: Callable[..., Any]) -> Callable[[str], bool]:
    """Says of a keyword whether `function` may be called with it."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return lambda name: takes_all or name in parameters
