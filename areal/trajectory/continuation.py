"""The ids that a new turn adds behind a recorded completion, without tokenising again what was sampled.

The rendered conversation must fall apart into

    the parent's prompt text | the parent's answer | closing of its turn + everything newer
    known ids                | sampled ids         | to be encoded

If it does not, because the template wrote the past differently this time (it drops earlier thinking, say), there is no
continuation and the caller starts a new branch.
"""

from collections.abc import Sequence
from typing import Any

from areal.api.errors import RequestError
from areal.trajectory.completion import Completion
from areal.trajectory.meaning import Message, same_words
from areal.trajectory.pictures import Picture
from areal.trajectory.renderer import Renderer
from areal.trajectory.window import window

Tools = list[dict[str, Any]] | None


def newer_text(
    renderer: Renderer, parent: Completion, before: list[Message], newer: list[Message], tools: Tools
) -> str | None:
    """The text behind the parent's answer, given the messages before and behind it. None = a branch must begin."""
    part = window(before, newer) if renderer.windows.trusted and tools is parent.tools else before
    if part is before:
        return _newer_text(renderer, parent, before, newer, tools)
    try:
        text = _newer_text(renderer, parent, part, newer, tools)
    except RequestError:
        text = None  # the template may accept the whole
    if text is not None and not renderer.windows.due(parent.depth):
        return text
    whole = _newer_text(renderer, parent, before, newer, tools)
    if text is not None:
        renderer.windows.check(whole == text)
    return whole


def newer_ids(renderer: Renderer, parent: Completion, newer: str, pictures: Sequence[Picture] = ()) -> list[int]:
    """The closing begins with the end token; where the model sampled it, it is there already."""
    if parent.end_id is not None:
        closing = newer.lstrip()  # white space that a template puts before its end token came too late
        if closing.startswith(renderer.decode([parent.end_id])):
            ids = renderer.encode(closing, pictures)
            if ids[:1] == [parent.end_id]:
                return ids[1:]
    return renderer.encode(newer, pictures)


def _newer_text(
    renderer: Renderer, parent: Completion, before: list[Message], newer: list[Message], tools: Tools
) -> str | None:
    prompt = renderer.render(before, parent.tools)
    text = renderer.render([*before, parent.message, *newer], tools)
    if not text.startswith(prompt):
        return None
    rest = text[len(prompt) :]
    if rest.startswith(parent.text):
        return rest[len(parent.text) :]
    behind = _behind_end(renderer, parent, rest)
    return behind if behind is not None else _behind_mark(renderer, parent, before, newer, tools, prompt, rest)


def _behind_end(renderer: Renderer, parent: Completion, rest: str) -> str | None:
    """What follows an answer that the template spells unlike the model did, found by the end token it sampled."""
    if parent.end_id is None:
        return None
    at = rest.find(renderer.decode([parent.end_id]))
    return rest[at:] if at >= 0 and _says(renderer, rest[:at], parent) else None


def _behind_mark(
    renderer: Renderer,
    parent: Completion,
    before: list[Message],
    newer: list[Message],
    tools: Tools,
    prompt: str,
    rest: str,
) -> str | None:
    """The same for an answer that was cut off, found by a mark in its place."""
    marked = {key: value for key, value in parent.message.items() if key != "tool_calls"} | {
        "content": renderer.sentinel
    }
    try:
        text = renderer.render([*before, marked, *newer], tools)
    except RequestError:
        return None  # a template may refuse tool results behind an answer without calls; a new branch is always right
    earlier, _, behind = text.partition(renderer.sentinel)
    if not earlier.startswith(prompt) or renderer.sentinel in behind or not rest.endswith(behind):
        return None
    return behind if _says(renderer, rest[: len(rest) - len(behind)], parent) else None


def _says(renderer: Renderer, rendered: str, parent: Completion) -> bool:
    """Whether a rendered turn reads as the parent's message; templates may change white space and spell calls anew."""
    said = renderer.format.read(rendered, parent.tools, thinking=parent.thinking)
    message = parent.message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return (
        same_words(said.content, message["content"])
        and same_words(said.reasoning, message.get("reasoning_content", ""))
        and [(call.name, call.arguments) for call in said.calls] == calls
    )
