"""One episode: the conversation as a person reads it, its tree of answers, and the same as coloured tokens."""

import json
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from areal.api.messages import Episode
from areal.store.search import StoreSearch, Trajectory
from areal.utils.conversation import answer_of, content_text, expected_of
from areal.utils.shorten import plural, shortened
from areal.viewer.episode_pages import task_block
from areal.viewer.frame import (
    Links,
    RunTab,
    facts,
    heading,
    number,
    page,
    seconds,
    signed,
    state_badge,
)
from areal.viewer.html import Child, Markup, data_block, el, visible
from areal.viewer.runs import Run
from areal.viewer.tokens import (
    MOST_TOKENS,
    CompletionFigures,
    Fork,
    Parting,
    TokenTexts,
    completion_figures,
    forks,
    token_columns,
)

LONGEST = 20_000
"""Characters of a message on the page; all of it is a file."""
ENOUGH = 1_000_000
"""Characters on a page, after which only the beginning of each message is shown."""
MOST_MESSAGES = 2000
FOLDED = 80
"""Characters of what is folded that are seen."""
DEEPEST = 50
"""Branches of branches in the picture of a tree."""
ANSWER_CHARACTERS = 2000
"""Of the expected and of the given answer, beside each other."""
MOST_ROWS = 50
"""Of tokens."""
COLOURS = (
    ("logprob", "Log-prob", "how likely the sampler found it"),
    ("ratio", "Ratio", "probability in the trainer over that in the sampler"),
    ("advantage", "Advantage", "what the loss was given"),
    ("entropy", "Entropy", "how undecided the policy was here, in nats"),
    ("version", "Weights", "the version that sampled it"),
)


@dataclass(frozen=True)
class Said:
    """A message in an episode, and where it stands."""

    place: int
    """Among all messages of the page."""
    message: dict[str, Any]
    completion: int | None = None
    """Which of the model's answers it is."""
    begins: int = -1
    """Which of the model's answers it is the first message for; -1 = none."""


def trajectory_page(links: Links, run: Run, found: Trajectory, texts: TokenTexts, first: int = 0) -> str:
    """`first` is the token that the coloured view begins with."""
    line, group, episode = found.line, found.group, found.episode
    figures = completion_figures(episode, found.trained)
    title = f"Episode {line.id}"
    known = facts(
        ("reward", el("strong", number(line.reward))),
        ("state", state_badge(line.state)),
        ("reason", el("code", line.reason) if line.reason else None),
        ("step", links.to_step(run.slug, line.step)),
        ("group", links.to_group(run.slug, line.task_id)),
        ("sample", str(line.sample)),
        ("tokens", f"{line.tokens:,} of {line.tokens + line.prompt_tokens:,}"),
        ("turns", f"{line.calls:,}"),
        ("staleness", str(line.staleness) if line.staleness is not None else None),
        ("time", seconds(line.seconds)),
        ("truncated", "yes" if line.truncated else None),
    )
    reader = _Transcript(links, run, line.id, episode, figures, forks(episode, texts))
    body = [
        heading(title),
        known,
        _answers(expected_of(group.task), answer_of(episode.messages)),
        task_block(group.task),
        _tabs(bool(episode.rows)),
        el("section", reader.render(), id="conversation", class_="conversation", aria_label="Conversation"),
        _tokens(found, texts, first, links, run)
        if episode.rows
        else el("p", "Its tokens are not kept.", class_="note"),
    ]
    place = RunTab(run.slug, run.name, "Episodes")
    return page(links, title, *body, place=place, scripts=("tokens.js", "reading.js"))


def message_texts(episode: Episode) -> list[str]:
    """The whole text of every message of the page, in its order."""
    return [visible(content_text(said.message.get("content"))) for said in _all_said(episode)]


def _all_said(episode: Episode) -> list[Said]:
    said: list[Said] = []
    for index in _order(episode):
        node = episode.nodes[index]
        new = [*((message, None) for message in node.messages), (node.message, index)]
        said += [
            Said(len(said) + offset, message, completion, index if offset == 0 else -1)
            for offset, (message, completion) in enumerate(new)
        ]
    if said:
        return said
    answers = 0
    for place, message in enumerate(episode.messages):
        is_answer = message.get("role") == "assistant"
        said.append(Said(place, message, answers if is_answer else None))
        answers += is_answer
    return said


def _order(episode: Episode) -> list[int]:
    """Answers as they are read: each conversation to its end, then its branches."""
    children, order = _children(episode), list[int]()
    waiting = list(reversed(children.get(None, [])))
    while waiting:
        index = waiting.pop()
        order.append(index)
        waiting += reversed(children.get(index, []))
    return order


def _children(episode: Episode) -> dict[int | None, list[int]]:
    """The answers that follow each answer; those that begin a conversation follow None."""
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(episode.nodes):
        children.setdefault(node.parent, []).append(index)
    return children


def _answers(expected: str | None, given: str) -> Child:
    """What should have come out beside what did."""
    if expected is None:
        return None
    clipped = [shortened(text, ANSWER_CHARACTERS) for text in (expected, given)]
    made = [
        el("div", el("h2", name), el("div", text or "nothing", class_="said", dir="auto", tabindex="0"))
        for name, text in zip(("Expected", "Given"), clipped, strict=True)
    ]
    return el("section", made, class_="answers", aria_label="Expected and given answer")


def _tabs(has_tokens: bool) -> Child:
    if not has_tokens:
        return None
    made = [
        el("button", name, type="button", role="tab", id=f"tab-{target}", aria_controls=target,
           aria_selected="true" if target == "conversation" else "false")
        for name, target in (("Conversation", "conversation"), ("Tokens", "tokens"))
    ]  # fmt: skip
    return el("div", made, class_="tabs", role="tablist", aria_label="How the episode is shown", hidden=True)


class _Transcript:
    """Renders each message once; branches follow the conversation that they part from."""

    def __init__(
        self,
        links: Links,
        run: Run,
        number: int,
        episode: Episode,
        figures: dict[int, CompletionFigures],
        forks: dict[int, Fork],
    ) -> None:
        self._links, self._run, self._number = links, run, number
        self._shown = 0
        """Characters so far."""
        self._episode, self._figures, self._forks = episode, figures, forks

    def render(self) -> Child:
        said = _all_said(self._episode)
        if not said:
            return el("p", "No messages were recorded.", class_="note")
        made: list[Child] = [self._outline()] if self._forks else []
        for each in said[:MOST_MESSAGES]:
            if each.begins in self._forks:
                made.append(self._fork(each.begins, self._forks[each.begins]))
            made.append(self._message(each))
        if len(said) > MOST_MESSAGES:
            made.append(el("p", f"{len(said) - MOST_MESSAGES:,} more messages; areal export has all.", class_="note"))
        return made

    def _outline(self) -> Markup:
        """The tree, with a link to each answer."""
        tree = self._branches(_children(self._episode), None)
        return el("nav", el("h2", "Tree"), tree, class_="tree", aria_label="Tree of answers")

    def _branches(self, children: dict[int | None, list[int]], parent: int | None, depth: int = 0) -> Markup:
        """Answers that follow each other stand in one line; a list begins where they part."""
        items = []
        for first in children.get(parent, []):
            chain, here = [first], first
            while len(children.get(here, [])) == 1:
                here = children[here][0]
                chain.append(here)
            links = [el("a", self._name(index), href=f"#answer-{index}") for index in chain]
            deeper = self._branches(children, here, depth + 1) if children.get(here) and depth < DEEPEST else None
            items.append(el("li", [part for link in links for part in (" → ", link)][1:], deeper))
        return el("ul", items)

    def _name(self, index: int) -> str:
        reward = self._episode.nodes[index].reward
        return f"answer {index}" + (f" ({number(reward)})" if reward is not None else "")

    def _fork(self, index: int, fork: Fork) -> Markup:
        node = self._episode.nodes[index]
        what = (
            f"The template rendered the conversation up to answer {fork.other} differently, so its tokens begin anew."
            if node.parent == fork.other and not node.extends
            else f"Answer {index} continues the same conversation as answer {fork.other} with other messages."
            if node.parent is not None
            else f"Answer {index} begins another conversation than answer {fork.other}."
        )
        compared = _parting(fork.parting, fork.other) if fork.parting is not None else None
        return el("aside", el("h2", f"Branch: answer {index}"), el("p", what), compared, class_="fork")

    def _message(self, said: Said) -> Markup:
        role = str(said.message.get("role", "?"))
        head: list[Child] = [el("span", role, class_="role")]
        if said.completion is not None:
            head.append(el("span", self._about(said), class_="note"))
        name = said.message.get("name")
        if name and role == "tool":
            head.append(el("code", str(name)))
        thinking = content_text(said.message.get("reasoning_content") or said.message.get("reasoning"))
        return el(
            "article",
            el("header", head),
            el("details", el("summary", "Thinking"), _text(thinking)) if thinking else None,
            self._body(said, role),
            [_tool_call(call) for call in said.message.get("tool_calls") or []],
            class_=f"message role-{role if role in ('system', 'user', 'assistant', 'tool') else 'other'}",
            id=f"answer-{said.completion}" if said.completion is not None else None,
        )

    def _body(self, said: Said, role: str) -> Child:
        text = content_text(said.message.get("content"))
        if not text:
            return None
        most = LONGEST if self._shown < ENOUGH else FOLDED
        self._shown += min(len(text), most)
        body = _text(text, self._links.message(self._run.slug, self._number, said.place), most)
        if role != "tool":
            return body
        return el("details", el("summary", "result ", el("span", _short(text), class_="note")), body)

    def _about(self, said: Said) -> str:
        """`reward 1 · return 0.9 · advantage +0.4 · 35 tokens · weights 3 · stop · 0.8 s`"""
        index = said.completion
        assert index is not None
        node = self._episode.nodes[index] if index < len(self._episode.nodes) else None
        reward = node.reward if node is not None else said.message.get("reward")
        about = [f"answer {index}"] if self._episode.nodes else []
        if isinstance(reward, int | float):
            about.append(f"reward {number(reward)}")
        figures = self._figures.get(index)
        if figures is not None:
            versions = "–".join(dict.fromkeys(map(str, figures.versions)))
            about += [f"return {number(figures.returns)}"] if figures.returns is not None else []
            about += [f"advantage {signed(figures.advantage)}"] if figures.advantage is not None else []
            about += [plural(figures.tokens, "token"), f"weights {versions}"]
            about += [] if figures.trained else ["not trained"]
        if node is not None:
            about += [f"ended by {node.finish}"] if node.finish else []
            about.append(seconds(node.answered - node.asked))
        return " · ".join(about)


def _parting(parting: Parting, other: int) -> Markup:
    return el(
        "dl",
        el("dt", f"after {plural(parting.place, 'common token')}"),
        el("dd", el("code", "…" if parting.common else "", parting.common)),
        el("dt", "here"),
        el("dd", el("code", el("ins", parting.here or "(the end)"))),
        el("dt", f"in answer {other}"),
        el("dd", el("code", el("del", parting.there or "(the end)"))),
    )


def _text(text: str, whole: str | None = None, most: int = LONGEST) -> list[Child]:
    """What was said; `whole` is where all of it is, if it is too long for the page."""
    shown: list[Child] = [el("div", text[:most], class_="said", dir="auto")]
    if len(text) > most:
        link = el("a", f"all {len(text):,} characters", href=whole) if whole else None
        shown.append(el("p", f"… {len(text) - most:,} more characters; ", link, class_="note"))
    return shown


def _tool_call(call: Any) -> Markup:
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments", "") if isinstance(function, dict) else str(call)
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, indent=2)
    name = str(function.get("name", "?")) if isinstance(function, dict) else "?"
    return el(
        "details",
        el("summary", "calls ", el("code", name), " ", el("span", _short(arguments), class_="note")),
        el("pre", arguments[:LONGEST], class_="json", dir="auto", tabindex="0"),
        class_="call",
    )


def _short(text: str) -> str:
    line = " ".join(text[: 2 * FOLDED].split())
    return line if len(line) <= FOLDED and len(text) <= 2 * FOLDED else f"{line[:FOLDED]} …"


def _tokens(found: Trajectory, texts: TokenTexts, first: int, links: Links, run: Run) -> Markup:
    rows = list(zip_longest(found.episode.rows, found.trained))[:MOST_ROWS]
    columns = [
        token_columns(row, computed, texts, first if first < len(row.input_ids) else 0) for row, computed in rows
    ]
    options = [el("option", f"{name}: {what}", value=value) for value, name, what in COLOURS]
    choice = el("label", "Colour ", el("select", options, id="colour"))
    return el(
        "section",
        el("div", choice, el("div", id="legend", class_="legend"), class_="controls"),
        [el("p", note, class_="note") for note in _token_notes(found, texts)],
        _token_pages(found, links.episode(run.slug, found.line.id), is_file=links.is_file),
        el("div", id="token-rows", class_="token-rows"),
        el("div", id="token-facts", class_="token-facts", role="status", aria_live="polite"),
        data_block("token-data", {"rows": columns}),
        id="tokens",
        class_="tokens",
        aria_label="Tokens",
    )


def _token_notes(found: Trajectory, texts: TokenTexts) -> list[str]:
    """What is not shown, and why."""
    notes = [] if texts.known else ["The run's tokenizer is not here, so ids are shown."]
    if not found.trained:
        notes.append("The trainer's figures are not there: it was not trained, or they are not kept.")
    if len(found.episode.rows) > MOST_ROWS:
        notes.append(f"{plural(len(found.episode.rows), 'row')}, of which {MOST_ROWS} are shown.")
    return notes


def _token_pages(found: Trajectory, address: str, *, is_file: bool) -> Child:
    """Links to the parts of rows that are too long for one page."""
    longest = max(len(row.input_ids) for row in found.episode.rows[:MOST_ROWS])
    if longest <= MOST_TOKENS:
        return None
    if is_file:
        return el("p", f"The first {MOST_TOKENS:,} of {longest:,} tokens.", class_="note")
    starts = range(0, longest, MOST_TOKENS)
    links = [[el("a", f"from {start:,}", href=f"{address}?first={start}#tokens"), " "] for start in starts]
    return el("p", "Tokens ", links, class_="note")


def load_trajectory(store: StoreSearch, number: int) -> Trajectory | None:
    try:
        return store.trajectory(number)
    except KeyError:
        return None
