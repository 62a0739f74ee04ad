"""What a check finds: a fault and its remedy, and the counts of episodes that were played."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.api.messages import Rejection, Stall
from areal.api.rejection import RejectReason

REMEDIES = {
    RejectReason.AGENT_ERROR: "mend it where the traceback points",
    RejectReason.TIMEOUT: "give every wait a deadline of its own, or raise rollout.agent.timeout_seconds",
    RejectReason.REWARD_ERROR: "return a finite number, or {completion id: number} with the ids of responses",
    RejectReason.REWARD_TIMEOUT: "make the reward function faster, or give AsyncRewardWrapper more timeout_seconds",
    RejectReason.NO_INTERACTIONS: "call the model at extra_kwargs['base_url'] with extra_kwargs['api_key']",
    RejectReason.FILTERED: "return None only for episodes that are not to be trained on",
}


@dataclass(frozen=True)
class Finding:
    what: str
    remedy: str
    where: str = ""
    """`file:line`; empty if it belongs to no line."""
    trace: str = ""
    """The user's traceback."""


@dataclass
class Played:
    """Episodes that were played in one way, added up."""

    name: str
    episodes: int = 0
    accepted: int = 0
    calls: int = 0
    completions: int = 0
    """Answers by id."""
    rewarded: int = 0
    """Of those, the ones that were given a reward of their own."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    forks: int = 0
    """Conversations that branched off others, or began anew beside them."""
    rewrites: int = 0
    """Forks because the chat template wrote the past anew."""
    seconds: float = 0.0
    rejections: list[Rejection] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)


@dataclass
class Report:
    workflow: str
    kind: str
    engine: str
    mode: str
    """inline, subproc, or any = both."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Those its constructor was given."""
    runs: list[Played] = field(default_factory=list)
    picklable: bool | None = None
    """Whether it can be sent to another process; None = not tried."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def passed_alone(self) -> bool:
        """Whether the first run accepted its episode, so that others are worth a try."""
        return bool(self.runs) and not self.runs[0].rejections


def rejected(run: Played, hint: str = "") -> list[Finding]:
    """A finding for each reason that episodes were rejected for, with the first of its details, and a `hint`."""
    found = []
    for reason in dict.fromkeys(rejection.reason for rejection in run.rejections):
        same = [rejection for rejection in run.rejections if rejection.reason is reason]
        what = f"{run.name}, {len(same)} of {run.episodes} rejected ({reason}): {same[0].detail}"
        found.append(Finding(what, f"{REMEDIES.get(reason, 'see its detail')}{hint}", trace=same[0].trace))
    return found


def blocked(stalls: Sequence[Stall], known: Sequence[str]) -> list[Finding]:
    """A finding for each line that blocked the event loop, but for those that are `known` as `file:line`."""
    found = []
    for where in dict.fromkeys(stall.where for stall in stalls):
        same = [stall for stall in stalls if stall.where == where]
        if where not in known:
            seconds = max(stall.seconds for stall in same)
            text = f"{same[0].source or same[0].function} blocked the event loop for {seconds:.1f} s"
            found.append(Finding(text, f"use {same[0].remedy}", where))
    return found
