"""One episode, whichever door it goes through, ends as an `Episode` or as a `Rejection` with its reason."""

import textwrap
import time
import traceback
from typing import Any, Protocol

from areal.api.errors import AgentFailed, EpisodeRejected
from areal.api.messages import Episode, Rejection
from areal.api.rejection import RejectReason
from areal.infra.workflow_context import WorkflowContext
from areal.utils import stats_tracker

DETAIL_CHARACTERS = 500

Digests = dict[int, str]
"""The weights behind an episode: version -> digest."""


class Door(Protocol):
    """A way to run episodes of one workflow."""

    name: str

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
    ) -> tuple[Episode | None, Digests]:
        """Run user code to its end, or to its deadline; None = it rejected the episode itself."""
        ...


async def run_episode(
    door: Door, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
) -> tuple[Episode | Rejection, Digests]:
    """Never raises but when cancelled from outside: an episode fails alone."""
    began = time.monotonic()
    try:
        with stats_tracker.collect() as stats:
            episode, digests = await door.play(data, context, greedy=greedy, seconds=seconds)
    except EpisodeRejected as error:
        return _rejection(error), {}
    except Exception as error:
        failed = AgentFailed(f"{door.name}: the episode failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        return _rejection(failed), {}
    if episode is None:
        return Rejection(RejectReason.FILTERED, f"{door.name} returned None"), digests
    episode.stats = stats.means()
    episode.seconds = time.monotonic() - began
    episode.turns = [(asked - began, answered - began, tokens) for asked, answered, tokens in episode.turns]
    return episode, digests


def _rejection(error: EpisodeRejected) -> Rejection:
    detail = textwrap.shorten(str(error), DETAIL_CHARACTERS, placeholder=" …")
    return Rejection(error.reason, detail, user_trace(error.__cause__))


def user_trace(cause: BaseException | None) -> str:
    """The traceback in the user's code; one that was raised in another process came as text."""
    if cause is None:
        return ""
    return getattr(cause, "trace", "") or "".join(traceback.format_exception(cause))
