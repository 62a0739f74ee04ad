"""The pages about several episodes: the table of all, and the samples of one group side by side."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import orjson

from areal.store.filters import COLUMNS, FilterError, parse_filter
from areal.store.search import EpisodeLine, GroupLine, Page, StoreSearch
from areal.utils.conversation import answer_of, task_of
from areal.utils.shorten import plural
from areal.viewer.frame import Links, RunTab, bar, facts, heading, number, page, seconds, signed, state_badge
from areal.viewer.html import Child, Markup, data_block, el, visible
from areal.viewer.runs import Run
from areal.viewer.tokens import completion_figures

FIRST_ROWS = 100
BRUSHED = ("reward", "tokens", "staleness", "seconds")
"""Columns whose histograms are shown above the table."""
FIELDS = [each.name for each in fields(EpisodeLine)]
MOST_SAMPLES = 64
"""Of a group that are shown side by side."""
SAMPLE_CHARACTERS = 4000


def episodes_page(
    links: Links, run: Run, store: StoreSearch, words: str, order: str, lines: Sequence[EpisodeLine] | None = None
) -> str:
    """The table of episodes. `lines`: all that a file has, which its script then searches by itself."""
    error = ""
    found: Page | None = None
    try:
        chosen = parse_filter(words)
        found = store.page(chosen, order, limit=FIRST_ROWS) if lines is None else None
        count = store.count(chosen)
    except FilterError as wrong:
        error, count = str(wrong), 0
    data = {
        "fields": FIELDS,
        "words": {
            name: list(column.words) or ["yes", "no"] for name, column in COLUMNS.items() if column.kind != "number"
        },
        "columns": list(COLUMNS),
        "brushed": list(BRUSHED),
        "episode": links.episode(run.slug, "{id}"),
        "group": links.group(run.slug, "{id}"),
        "url": links.data(run.slug, "episodes.json"),
        "histogram_url": links.data(run.slug, "histogram.json"),
        "filter": words,
        "order": order,
        "count": count,
        "error": error,
        "rows": rows_of(found.episodes if found is not None else lines or []),
        "next": found.next if found is not None else None,
    }
    body = [
        heading("Episodes"),
        _filter_form(links, run, words, order, error),
        el(
            "div",
            id="histograms",
            role="group",
            class_="histograms",
            aria_label="Distributions of the episodes that are shown",
        ),
        el("p", f"{plural(count, 'episode')}" if not error else "", id="count", role="status", class_="note"),
        el(
            "div",
            id="episodes",
            class_="episodes",
            tabindex="0",
            role="region",
            aria_label="Episodes; j and k move, Enter opens",
        ),
        data_block("episodes-data", data),
    ]
    place = RunTab(run.slug, run.name, "Episodes")
    return page(links, f"Episodes of {run.name}", *body, place=place, scripts=("episodes.js",))


def _filter_form(links: Links, run: Run, words: str, order: str, error: str) -> Markup:
    box = el(
        "input",
        type="search",
        name="filter",
        id="filter",
        value=words,
        placeholder='reward<0.5 tokens>200 step:300-500 "some words"',
        autocomplete="off",
        autocapitalize="off",
        spellcheck="false",
        role="combobox",
        aria_expanded="false",
        aria_controls="completions",
        aria_autocomplete="list",
        aria_describedby="filter-error",
        aria_label="Filter",
    )
    completions = el("ul", id="completions", role="listbox", aria_label="Completions", hidden=True)
    keys = [(" to filter, ", "/"), (" ", "j"), (" to move, ", "k"), (" to open", "Enter")]
    hint = el("p", [[el("kbd", key), rest] for rest, key in keys], class_="note keys")
    return el(
        "form",
        el("div", box, completions, class_="completing"),
        el("p", error, id="filter-error", role="alert", class_="error"),
        el("input", type="hidden", name="order", value=order, id="order"),
        hint,
        action=links.episodes(run.slug),
        method="get",
        id="filter-form",
        role="search",
    )


def rows_of(lines: Sequence[EpisodeLine]) -> list[list[Any]]:
    """As a script gets them: values in the order of `FIELDS`; text is visible."""
    return [
        [visible(value) if isinstance(value, str) else value for value in (getattr(line, name) for name in FIELDS)]
        for line in lines
    ]


def group_page(links: Links, run: Run, store: StoreSearch, group: GroupLine) -> str:
    """The samples of one task beside each other: what each said, got, and was worth."""
    chosen = parse_filter(f"group:{group.task_id}")
    lines = store.page(chosen, "sample", limit=MOST_SAMPLES).episodes
    episodes, trained = store.episodes(group.task_id), store.trained(group.task_id)
    rewards = [line.reward for line in lines]
    advantages = {
        line.id: _advantage(completion_figures(episodes[line.id], trained.get(line.id, []))) for line in lines
        if line.id in episodes
    }  # fmt: skip
    signal: Child = None
    if len(rewards) > 1 and len(set(rewards)) == 1:
        why = f": all {len(rewards)} samples have reward {number(rewards[0])}, so nothing tells them apart."
        signal = el("p", el("strong", "No signal"), why, class_="callout")
    known = facts(
        ("state", state_badge(group.state)),
        ("reason", el("code", group.reason) if group.reason else None),
        ("step", links.to_step(run.slug, group.step)),
        ("reward", f"{number(group.reward)} ± {number(group.reward_spread)}" if group.reward is not None else None),
        ("tokens", f"{group.tokens:,}"),
        ("weights", f"from version {group.oldest_version}" if group.oldest_version is not None else None),
        ("time", seconds(group.ended - group.began) if group.ended else None),
    )
    most = max((abs(each) for each in [*rewards, *(a for a in advantages.values() if a is not None)]), default=1.0)
    samples = [_sample(links, run, line, episodes.get(line.id), advantages.get(line.id), most) for line in lines]
    body = [
        heading(f"Group {group.task_id}", plural(len(lines), "sample")),
        known,
        task_block(group.task),
        signal,
        el("div", samples, class_="samples"),
    ]
    return page(links, f"Group {group.task_id}", *body, place=RunTab(run.slug, run.name, "Episodes"))


def _sample(links: Links, run: Run, line: EpisodeLine, episode: Any, advantage: float | None, most: float) -> Markup:
    title = f"Sample {line.sample}"
    text = answer_of(episode.messages) if episode is not None else line.preview
    shown = text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]} … ({len(text):,} characters)"
    drawn = bar(advantage, most, f"advantage {advantage:+g}") if advantage is not None else None
    figures = [
        ("reward", number(line.reward), bar(line.reward, most, f"reward {line.reward:g}")),
        ("advantage", signed(advantage), drawn),
    ]
    rows = [
        el("tr", el("th", name, scope="row"), el("td", value), el("td", picture)) for name, value, picture in figures
    ]
    note = " · ".join([plural(line.tokens, "token"), plural(line.calls, "call"), seconds(line.seconds)])
    return el(
        "article",
        el("h2", links.to_episode(run.slug, line.id, title)),
        el("table", el("tbody", rows), class_="bars"),
        el("p", note, " · truncated" if line.truncated else None, class_="note"),
        el("div", shown or "nothing was said", class_="said", dir="auto", tabindex="0"),
        class_="sample",
    )


def _advantage(completions: dict[int, Any]) -> float | None:
    """The mean over completions."""
    known = [each.advantage for each in completions.values() if each.advantage is not None]
    return sum(known) / len(known) if known else None


def task_block(text: str) -> Child:
    """The task as JSON, folded."""
    if not text:
        return None
    task = task_of(text)
    shown = orjson.dumps(task, option=orjson.OPT_INDENT_2).decode() if task else text
    return el("details", el("summary", "The task"), el("pre", shown, class_="json", dir="auto", tabindex="0"))
