"""A conversation and its task as a person reads them: the text of a message, the answer given, the answer expected."""

import json
from collections.abc import Sequence
from typing import Any

import orjson

EXPECTED = ("answer", "expected", "expected_answer", "solution", "target", "ground_truth", "label", "reference")
"""Keys of a task under which people keep what should come out."""


def task_of(text: str) -> dict[str, Any]:
    """The task of a group, from the JSON that a store keeps; empty if it was too long to be kept whole."""
    try:
        task = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return task if isinstance(task, dict) else {}


def expected_of(text: str) -> str | None:
    """What should come out, if the task (as in `task_of`) says it under a name that people use."""
    task = task_of(text)
    found = next((task[name] for name in EXPECTED if task.get(name) not in (None, "")), None)
    return None if found is None else found if isinstance(found, str) else orjson.dumps(found).decode()


def answer_of(messages: Sequence[dict[str, Any]]) -> str:
    """What the model said last."""
    for message in reversed(messages):
        if message.get("role") == "assistant" and (text := content_text(message.get("content"))):
            return text
    return ""


def content_text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts; a part without text is named by its type."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"
