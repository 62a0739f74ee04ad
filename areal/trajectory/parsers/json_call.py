"""A tool call as a JSON object: a name, and arguments under the key that a model family uses."""

from typing import Any

from areal.trajectory.parsers.events import ToolCall


def named_call(call: Any, arguments_keys: tuple[str, ...], other_keys: frozenset[str] = frozenset()) -> ToolCall:
    """A JSON object with exactly a name and arguments. Raises ValueError."""
    keys = set(call) - other_keys - {"name"} if isinstance(call, dict) and "name" in call else set()
    key = keys.pop() if len(keys) == 1 else None
    if key not in arguments_keys:
        raise ValueError("a call must have a name and arguments, and nothing else")
    name, arguments = call["name"], call[key]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call's name must be a text and its arguments an object")
    return ToolCall(name, arguments)
