"""A report as a person reads it in a terminal."""

from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from areal.cli.checking.findings import Finding, Played, Report
from areal.infra.stack import is_user_code

TRACE_LINES = 12

FACTS: dict[str, Callable[[Played], str]] = {
    "episodes accepted": lambda run: f"{run.accepted} of {run.episodes}",
    "model calls": lambda run: f"{run.calls}",
    "answers with a reward": lambda run: f"{run.rewarded} of {run.completions}" if run.completions else "–",
    "tokens, prompt + sampled": lambda run: f"{run.prompt_tokens:,} + {run.completion_tokens:,}",
    "reward": lambda run: _range(run.rewards),
    "forks": lambda run: f"{run.forks}" if run.completions else "–",
    "event loop blocked": lambda run: _blocked(run),
    "time": lambda run: f"{run.seconds:.2f} s",
}
"""What is shown of each run, a row each."""


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
    """The mean, and from where to where if they differ."""
    if not rewards:
        return "–"
    mean = f"{sum(rewards) / len(rewards):.3g}"
    least, most = min(rewards), max(rewards)
    return mean if least == most else f"{mean} ({least:.3g} to {most:.3g})"


def _blocked(run: Played) -> str:
    return f"{sum(stall.seconds for stall in run.stalls):.1f} s" if run.stalls else "no"


def _finding(finding: Finding) -> RenderableType:
    where = f"{finding.where}  " if finding.where else ""
    lines = [
        _marked("✗ ", "red", Text.assemble((where, "bold"), finding.what)),
        _marked("  → ", "green", Text(finding.remedy)),
    ]
    if finding.trace:
        lines.append(Padding(Text("\n".join(_own_lines(finding.trace)), style="dim"), (0, 0, 0, 4)))
    return Group(*lines)


def _own_lines(trace: str) -> list[str]:
    """The user's part of a traceback, without marks under the code, which a narrow terminal tears off."""
    kept, ours = [], False
    for line in trace.rstrip().splitlines():
        if line.lstrip().startswith('File "'):
            ours = not is_user_code(line.split('"')[1])
        if line.strip(" ^~") and not (ours and line.startswith("  ")):
            kept.append(line)
    return kept[-TRACE_LINES:]


def _marked(mark: str, style: str, text: Text) -> RenderableType:
    """A mark, and text that hangs beside it."""
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
