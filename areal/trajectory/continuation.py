"""The ids that a new turn adds behind a recorded completion, without tokenising again what was sampled.

The rendered conversation must fall apart into

    the parent's prompt text | the parent's answer | closing of its turn + everything newer
    known ids                | sampled ids         | to be encoded

If it does not, because the template wrote the past differently this time (it drops earlier thinking, say), there is no
continuation and the caller starts a new branch.
"""

from typing import Any

from areal.api.errors import RequestError
from areal.trajectory.completion import Completion
from areal.trajectory.meaning import Message
from areal.trajectory.renderer import Renderer, text_digest


def continue_ids(
    renderer: Renderer,
    parent: Completion,
    messages: list[Message],
    answer_at: int,
    tools: list[dict[str, Any]] | None,
    text: str,
) -> list[int] | None:
    """Ids behind the parent's last one, or None; `text` renders `messages`, whose `answer_at`-th is the parent's."""
    if text_digest(text[: parent.text_length]) != parent.text_digest:
        return None
    rest = text[parent.text_length :]
    if rest.startswith(parent.text):
        newer: str | None = rest[len(parent.text) :]
    else:
        newer = _behind_answer(renderer, parent, messages, answer_at, tools, rest)
    return None if newer is None else _encode_newer(renderer, newer, parent.end_id)


def _behind_answer(
    renderer: Renderer,
    parent: Completion,
    messages: list[Message],
    answer_at: int,
    tools: list[dict[str, Any]] | None,
    rest: str,
) -> str | None:
    """What follows an answer that the template spells unlike the model did, found by a mark in the answer's place."""
    marked = {"role": "assistant", "content": renderer.sentinel}
    try:
        text = renderer.render([*messages[:answer_at], marked, *messages[answer_at + 1 :]], tools)
    except RequestError:
        return None  # a template may refuse tool results behind an answer without calls; a new branch is always right
    before, _, newer = text.partition(renderer.sentinel)
    if text_digest(before[: parent.text_length]) != parent.text_digest or renderer.sentinel in newer:
        return None
    if before[parent.text_length :].strip():  # white space before an answer may be the model's to write
        return None
    if not rest.endswith(newer) or not _says(rest[: len(rest) - len(newer)], parent.message):
        return None
    return newer


def _says(rendered: str, message: Message) -> bool:
    """Whether a rendered turn still holds the message's content and calls; templates may change white space only."""
    content = "".join(message["content"].split())
    calls = message.get("tool_calls", ())
    return content in "".join(rendered.split()) and all(call["function"]["name"] in rendered for call in calls)


def _encode_newer(renderer: Renderer, newer: str, end_id: int | None) -> list[int]:
    """The closing begins with the end token; where the model sampled it, it is there already."""
    if end_id is not None:
        closing = newer.lstrip()  # white space that a template puts before its end token came too late
        if closing.startswith(renderer.decode([end_id])):
            ids = renderer.encode(closing)
            if ids[:1] == [end_id]:
                return ids[1:]
    return renderer.encode(newer)
