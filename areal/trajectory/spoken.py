"""Thinking and tool calls that a client wrote into the text of an assistant's message instead of their own fields.

Thinking is certain by its marks. Two spellings of calls are certain to say the same as the calls themselves: the
model's own syntax, and the list of calls as the wire has it, in JSON or as Python prints it, behind an optional line
that announces it. Anything else stays text.
"""

import ast
import json
import re
from typing import Any

from areal.trajectory.meaning import Message, parse_arguments
from areal.trajectory.parsers import AnswerFormat
from areal.trajectory.parsers.syntax import Tools

_LISTED = re.compile(r"(?:\A|\n)(?:[^\n\[\]{}]{0,40}:\n?)? ?(?=\[\s*\{)")


def meant(message: Message, format: AnswerFormat, tools: Tools | None) -> Message:
    """The message with thinking and calls out of the text; itself if there are none."""
    if message["role"] != "assistant":
        return message
    marks = format.reasoning
    thought = message.get("reasoning_content")
    if marks is not None and not thought and message["content"].lstrip().startswith(marks.open):
        said = format.read(message["content"], None)
        message = {**message, "content": said.content, "reasoning_content": said.reasoning}
    return message if message.get("tool_calls") else _with_calls(message, format, tools)


def _with_calls(message: Message, format: AnswerFormat, tools: Tools | None) -> Message:
    content, syntax = message["content"], format.calls
    if any(mark in content for mark in syntax.marks) or (syntax.bare and content.lstrip().startswith(syntax.bare)):
        said = AnswerFormat(syntax).read(content, tools or ())
        if said.calls:
            calls = [{"id": "", "function": {"name": call.name, "arguments": call.arguments}} for call in said.calls]
            return {**message, "content": said.content, "tool_calls": calls}
    listed = _LISTED.search(content) if "function" in content else None
    written = None if listed is None else _wire_calls(content[listed.end() :].rstrip())
    if listed is None or written is None:
        return message
    return {**message, "content": content[: listed.start()], "tool_calls": written}


def _wire_calls(text: str) -> list[dict[str, Any]] | None:
    for read in (json.loads, ast.literal_eval):
        try:
            calls = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(calls, list) and all(map(_is_call, calls)):
            return [_plain(call) for call in calls]
    return None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments"), dict | str)


def _plain(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"id": call["id"], "function": {**function, "arguments": parse_arguments(function["arguments"])}}
