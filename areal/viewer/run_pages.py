"""The pages about whole runs: the list of runs, curves of several runs, one run, and what was rejected in it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from areal.api.messages import Doing
from areal.infra.status import sentence
from areal.store.search import RejectionKind, StoreSearch
from areal.trainer.status import Report, doings_of
from areal.utils.shorten import plural
from areal.viewer.frame import (
    UNKNOWN,
    Links,
    RunTab,
    clock,
    facts,
    heading,
    number,
    page,
    seconds,
    sparkline,
    state_badge,
)
from areal.viewer.html import Child, Markup, data_block, el
from areal.viewer.runs import Config, HeldOut, Run, RunFacts, differences

CHARTS = ("uplot.js", "charts.js")
MOST_DIFFERENCES = 5
"""Of the settings of a run that a list shows."""
NOT_FIGURES = frozenset({"step", "time_seconds", "eval_reward", "eval_greedy_reward"})
FIRST_FIGURES = ("reward", "staleness", "entropy", "kl", "tokens_per_second", "rejected", "loss", "grad_norm")
"""Those that a page opens with, in this order."""
TITLES = {
    "reward": "Reward",
    "staleness": "Staleness, versions",
    "entropy": "Entropy",
    "kl": "KL",
    "tokens_per_second": "Tokens per second",
    "rejected": "Episodes rejected",
    "loss": "Loss",
    "grad_norm": "Gradient norm",
}


def runs_page(links: Links, found: Sequence[RunFacts]) -> str:
    """All runs, the newest first."""
    listed = sorted(found, key=lambda each: -(each.began or 0))
    if not listed:
        none = el("p", "There is no run here yet; ", el("code", "areal train"), " makes one.")
        return page(links, "areal", heading("Runs"), none)
    head = ("", "Run", "State", "Reward", "Held-out", "Steps", "Time", "Begun", "Set differently")
    differing = _differing_in_experiments(listed)
    rows = [_run_row(links, each, differing[each.run.experiment]) for each in listed]
    table = el(
        "table",
        el("thead", el("tr", [el("th", name or el("span", "compare", class_="unseen"), scope="col") for name in head])),
        el("tbody", rows),
        class_="runs",
    )
    compare = el("p", el("button", "Compare the ticked runs", type="submit"), class_="actions")
    form = el("form", el("div", table, class_="wide"), compare, action=links.compare(), method="get", id="runs")
    return page(links, "Runs", heading("Runs", plural(len(listed), "run")), form, scripts=("runs.js",))


def _differing_in_experiments(listed: Sequence[RunFacts]) -> dict[Path, list[str]]:
    """Settings that differ between runs of an experiment; those of others differ in everything."""
    configs: dict[Path, list[Config]] = {}
    for each in listed:
        configs.setdefault(each.run.experiment, []).append(each.config)
    return {experiment: differences([config for config in each if config]) for experiment, each in configs.items()}


def _run_row(links: Links, each: RunFacts, differing: Sequence[str]) -> Markup:
    run = each.run
    if each.state == "unreadable":
        told = el("td", each.verdict, colspan=6)
        return el("tr", el("td"), el("td", run.name), el("td", state_badge(each.state)), told)
    reward: Child = UNKNOWN
    if each.rewards:
        reward = [sparkline(each.rewards), " ", el("span", number(each.rewards[-1]), class_="figure")]
    tick = el("input", type="checkbox", name="run", value=run.slug, aria_label=f"compare {run.name}")
    cells: list[Child] = [
        tick,
        el("a", run.name, href=links.run(run.slug)),
        state_badge(each.state),
        reward,
        _held_out(each.held_out),
        _steps(each),
        seconds(each.seconds),
        clock(each.began),
        _settings(each.config, differing),
    ]
    return el("tr", [el("td", cell) for cell in cells])


def _steps(each: RunFacts) -> str:
    return f"{each.step:,} of {each.total_steps:,}" if each.total_steps else f"{each.step:,}"


def _held_out(held_out: HeldOut | None) -> Child:
    if held_out is None:
        return UNKNOWN
    before, after = held_out.before, held_out.after
    shown: list[Child] = [el("span", f"{before.reward:.2f}", class_="figure")]
    if after is not None:
        shown += [" → ", el("strong", f"{after.reward:.2f}", class_="figure")]
    last = after or before
    if last.interval:
        shown.append(
            el("span", f" {last.interval[0]:.2f}–{last.interval[1]:.2f}", class_="note", title="95 % interval")
        )
    return shown


def _settings(config: Config, names: Sequence[str]) -> Child:
    if not names:
        return UNKNOWN
    shown = [el("code", f"{name}={config.get(name)}") for name in names[:MOST_DIFFERENCES]]
    more = len(names) - MOST_DIFFERENCES
    return el("span", shown, f" and {more} more" if more > 0 else None, class_="settings")


def compare_page(links: Links, chosen: Sequence[tuple[RunFacts, dict[str, Any]]]) -> str:
    """Curves of several runs on one chart for each figure; `chosen` with what `chart_data` says."""
    runs = [about for about, _ in chosen]
    note = " · ".join(each.run.name for each in runs)
    title = heading("Compare", note or "Tick two runs or more in the list of runs.")
    names = differences([each.config for each in runs]) if runs else []
    head = el("tr", el("th", "Setting", scope="col"), [el("th", each.run.name, scope="col") for each in runs])
    rows = [_setting(name, [each.config.get(name) for each in runs]) for name in names]
    settings = [
        el("h2", "Set differently"),
        el("div", el("table", el("thead", head), el("tbody", rows)), class_="wide") if names else el("p", "Nothing."),
    ]
    data = [{"name": each.run.name, **figures} for each, figures in chosen]
    verdicts = el("ul", [el("li", el("strong", each.run.name), " ", each.verdict) for each in runs])
    block = data_block("compare-data", {"runs": data, "titles": TITLES, "first": FIRST_FIGURES})
    body = [verdicts, _chart_controls(by_time=True), el("div", id="charts", class_="charts"), settings, block]
    return page(links, "Compare", title, body if runs else None, scripts=CHARTS if runs else ())


def _setting(name: str, values: Sequence[Any]) -> Markup:
    return el("tr", el("th", el("code", name), scope="row"), [el("td", el("code", str(value))) for value in values])


def run_page(links: Links, about: RunFacts, store: StoreSearch, report: Report | None) -> str:
    """One run. `report` is what its driver says, if it runs."""
    run = about.run
    known = facts(
        ("state", state_badge(about.state)),
        ("steps", _steps(about)),
        ("time", seconds(about.seconds)),
        ("begun", clock(about.began)),
        ("episodes", el("a", f"{store.count():,}", href=links.episodes(run.slug))),
        ("trained tokens", f"{store.trained_tokens():,}"),
        ("rejected", el("a", f"{sum(store.rejected().values()):,}", href=links.rejections(run.slug))),
        ("model", el("code", str(about.config.get("actor.path", UNKNOWN)))),
        ("workflow", el("code", str(about.config.get("workflow") or UNKNOWN))),
    )
    settings = [_setting(name, [value]) for name, value in about.config.items()]
    data = {
        **chart_data(store),
        "titles": TITLES,
        "first": FIRST_FIGURES,
        "episodes": links.episodes(run.slug, "step:{step}"),
    }
    body = [
        heading(run.name),
        el("p", about.verdict, class_="verdict"),
        el("p", el("strong", "It failed"), f": {about.failure}", class_="callout") if about.failure else None,
        known,
        _live(links, about, report, store.states()) if report is not None else None,
        _chart_controls(),
        el("div", id="charts", class_="charts"),
        el("details", el("summary", "Settings"), el("div", el("table", el("tbody", settings)), class_="wide")),
        data_block("run-data", data),
    ]
    return page(links, run.name, *body, place=RunTab(run.slug, run.name, "Run"), scripts=(*CHARTS, "live.js"))


def _live(links: Links, about: RunFacts, report: Report, states: dict[str, int]) -> Markup:
    """What a script keeps up to date."""
    return el(
        "section",
        live_strip(report, states),
        id="live",
        class_="live",
        data_url=links.data(about.run.slug, "live"),
        data_figures=links.data(about.run.slug, "figures.json"),
        data_step=about.step,
        aria_label="What the run does now",
    )


def _chart_controls(*, by_time: bool = False) -> Markup:
    amounts = [("0", "none"), ("0.6", "some"), ("0.9", "much")]
    options = [el("option", name, value=value, selected=value == "0.6") for value, name in amounts]
    smooth = el("label", "Smoothing ", el("select", options, id="smoothing"))
    if by_time:
        ways = [el("option", name, value=value) for value, name in (("step", "steps"), ("time", "time"))]
        other = el("label", "Across ", el("select", ways, id="axis"))
    else:
        other = el("span", "A click on a step opens its episodes.", class_="note")
    return el("div", smooth, other, class_="controls")


def live_strip(report: Report | None, states: dict[str, int]) -> Markup:
    """What each part of a run does; the trainer first."""
    if report is None:
        return el("div")
    counts = ", ".join(f"{count:,} {state}" for state, count in states.items() if state in ("running", "ready"))
    if "parts" not in report:
        return el("div", el("h2", "Now"), el("p", str(report.get("text", ""))))
    told = [_doing(each) for each in doings_of(report)]
    return el("div", el("h2", "Now"), el("p", f"Groups: {counts}." if counts else None, class_="note"), el("ul", told))


def _doing(doing: Doing) -> Markup:
    inside = [_doing(each) for each in doing.inside]
    return el("li", sentence(doing), el("ul", inside) if inside else None)


def chart_data(store: StoreSearch) -> dict[str, Any]:
    """The figures of each step as columns, evaluations, and the times of steps."""
    steps: list[int] = []
    times: list[float | None] = []
    columns: dict[str, list[float | None]] = {}
    held_out: dict[str, list[list[float | None]]] = {"sampled": [], "greedy": []}
    for line in store.metrics():
        evaluated = [
            (kind, key) for kind, key in (("sampled", "eval_reward"), ("greedy", "eval_greedy_reward")) if key in line
        ]
        for kind, key in evaluated:
            point = [line["step"], line[key], line.get(f"{key}_low"), line.get(f"{key}_high"), line.get("time_seconds")]
            held_out[kind].append(point)
        if evaluated:
            continue
        steps.append(line["step"])
        times.append(line.get("time_seconds"))
        for name, value in line.items():
            if name not in NOT_FIGURES and (value is None or isinstance(value, int | float)):
                columns.setdefault(name, [None] * (len(steps) - 1)).append(value)
        for values in columns.values():
            if len(values) < len(steps):
                values.append(None)
    return {"steps": steps, "times": times, "figures": columns, "held_out": held_out}


def rejections_page(links: Links, run: Run, kinds: Iterable[RejectionKind]) -> str:
    listed = list(kinds)
    total = sum(kind.count for kind in listed)
    note = f"{plural(total, 'episode')} for {plural(len(listed), 'reason')}" if listed else "Nothing was rejected."
    over_time = {
        "reasons": [kind.reason for kind in listed],
        "by_step": [kind.by_step for kind in listed],
        "episodes": links.episodes(run.slug, "state:rejected step:{step}"),
    }
    body = [
        heading("Rejections", note),
        [el("div", id="rejection-chart", class_="charts"), data_block("rejection-data", over_time)] if listed else None,
        [_rejection_kind(links, run, kind) for kind in listed],
    ]
    place = RunTab(run.slug, run.name, "Rejections")
    return page(links, f"Rejections of {run.name}", *body, place=place, scripts=CHARTS if listed else ())


def _rejection_kind(links: Links, run: Run, kind: RejectionKind) -> Markup:
    first, last = kind.by_step[0][0], kind.by_step[-1][0]
    when = f"in step {first}" if first == last else f"in steps {first} to {last}"
    behind = el("a", "episodes", href=links.episodes(run.slug, f"reason:{kind.reason}"))
    trace = el(
        "details", el("summary", "One traceback"), el("pre", kind.trace, class_="trace", tabindex="0"), open=True
    )
    return el(
        "section",
        el("h2", el("code", kind.reason), " ", el("span", f"{kind.count:,}", class_="figure")),
        el("p", f"{when}; the newest of task {kind.task_id}, {clock(kind.at)}. ", behind, class_="note"),
        el("p", kind.detail),
        trace if kind.trace else None,
        class_="rejection",
    )
