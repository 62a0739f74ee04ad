"""What a check finds, each fault with its remedy, and the counts of the episodes it played; shown in a terminal."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from areal.api.errors import RejectReason
from areal.api.messages import Rejection, Stall
from areal.infra.stalls import is_user_code
from areal.utils.shorten import printable

REMEDIES = {
    RejectReason.AGENT_ERROR: "fix it where the traceback points",
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
class PlayedEpisodes:
    """Episodes that were played in one way, added up."""

    name: str
    episodes: int = 0
    accepted: int = 0
    calls: int = 0
    completions: int = 0
    """Answers by id."""
    rewarded: int = 0
    """Of those, the ones that got a reward of their own."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    forks: int = 0
    """Conversations that branched off others, or began a second time."""
    rewrites: int = 0
    """Forks because the chat template changed earlier turns."""
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
    """Those given to its constructor."""
    runs: list[PlayedEpisodes] = field(default_factory=list)
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


def rejection_findings(run: PlayedEpisodes, hint: str = "") -> list[Finding]:
    """A finding for each reason why episodes were rejected, with its first detail; `hint` is added to the remedy."""
    found = []
    for reason in dict.fromkeys(rejection.reason for rejection in run.rejections):
        same = [rejection for rejection in run.rejections if rejection.reason is reason]
        what = f"{run.name}, {len(same)} of {run.episodes} rejected ({reason}): {same[0].detail}"
        found.append(Finding(what, f"{REMEDIES.get(reason, 'see its detail')}{hint}", trace=same[0].trace))
    return found


def stall_findings(stalls: Sequence[Stall], known: Collection[str]) -> list[Finding]:
    """A finding for each line that blocked the event loop, except those that are `known`, as `file:line`."""
    found = []
    for where in dict.fromkeys(stall.where for stall in stalls):
        same = [stall for stall in stalls if stall.where == where]
        if where not in known:
            seconds = max(stall.seconds for stall in same)
            text = f"{same[0].source or same[0].function} blocked the event loop for {seconds:.1f} s"
            found.append(Finding(text, f"use {same[0].remedy}", where))
    return found


TRACE_LINES = 12

FACTS: dict[str, Callable[[PlayedEpisodes], str]] = {
    "episodes accepted": lambda run: f"{run.accepted} of {run.episodes}",
    "model calls": lambda run: f"{run.calls}",
    "answers with a reward": lambda run: f"{run.rewarded} of {run.completions}" if run.completions else "–",
    "tokens, prompt + sampled": lambda run: f"{run.prompt_tokens:,} + {run.completion_tokens:,}",
    "reward": lambda run: _range(run.rewards),
    "forks": lambda run: f"{run.forks}" if run.completions else "–",
    "event loop blocked": lambda run: _blocked(run),
    "time": lambda run: f"{run.seconds:.2f} s",
}
"""The rows of the table: what is shown of each run."""


def show(report: Report, console: Console) -> None:
    console.print(Text(report.workflow, style="bold"), soft_wrap=True)
    console.print(Text(_about(report), style="dim"))
    console.print()
    console.print(_table(report))
    console.print()
    for finding in report.findings:
        console.print(_finding(finding))
    for note in report.notes:
        console.print(_marked("· ", "yellow", Text(note)))
    console.print(_verdict(report), soft_wrap=True)


def _about(report: Report) -> str:
    sent = {True: ", can be sent to a process", False: ", cannot be sent to a process", None: ""}
    mode = f", mode {report.mode}" if report.kind == "agent" else ""
    return f"{report.kind}{mode}, {report.engine} engine{sent[report.picklable]}"


def _table(report: Report) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column("", style="dim")
    for run in report.runs:
        good = run.accepted == run.episodes and not run.stalls
        header = Text.assemble(("✓ ", "green") if good else ("✗ ", "red"), (run.name, "bold"))
        table.add_column(header, justify="right", no_wrap=True)
    for name, value in FACTS.items():
        table.add_row(name, *(value(run) for run in report.runs))
    return table


def _range(rewards: list[float]) -> str:
    """The mean, and the range if they differ."""
    if not rewards:
        return "–"
    mean = f"{sum(rewards) / len(rewards):.3g}"
    least, most = min(rewards), max(rewards)
    return mean if least == most else f"{mean} ({least:.3g} to {most:.3g})"


def _blocked(run: PlayedEpisodes) -> str:
    return f"{sum(stall.seconds for stall in run.stalls):.1f} s" if run.stalls else "no"


def _finding(finding: Finding) -> RenderableType:
    where = f"{finding.where}  " if finding.where else ""
    lines = [
        _marked("✗ ", "red", Text.assemble((where, "bold"), printable(finding.what))),
        _marked("  → ", "green", Text(finding.remedy)),
    ]
    if finding.trace:
        lines.append(Padding(Text(printable("\n".join(_own_lines(finding.trace))), style="dim"), (0, 0, 0, 4)))
    return Group(*lines)


def _own_lines(trace: str) -> list[str]:
    """The user's part of a traceback, without the marks under the code, which a narrow terminal would misplace."""
    kept, ours = [], False
    for line in trace.rstrip().splitlines():
        if line.lstrip().startswith('File "'):
            ours = not is_user_code(line.split('"')[1])
        if line.strip(" ^~") and not (ours and line.startswith("  ")):
            kept.append(line)
    return kept[-TRACE_LINES:]


def _marked(mark: str, style: str, text: Text) -> RenderableType:
    """A mark, and text with a hanging indent after it."""
    grid = Table.grid()
    grid.add_row(Text(mark, style=style), text)
    return grid


def _verdict(report: Report) -> Text:
    if report.passed:
        mode = " with rollout.agent.mode=subproc" if report.mode == "subproc" else ""
        kwargs = f", workflow_kwargs={report.arguments}" if report.arguments else ""
        return Text(f'ready to train: trainer.train(workflow="{report.workflow}"{kwargs}){mode}', style="green")
    count = len(report.findings)
    return Text(f"{count} finding{'s' * (count != 1)}", style="bold red")
