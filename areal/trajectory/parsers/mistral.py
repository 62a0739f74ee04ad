"""Tool calls as Mistral writes them: after `[TOOL_CALLS]` a JSON list of calls or, in newer models, NAME[ARGS]{...}."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from areal.trajectory.parsers.base import (
    Block,
    CallFrame,
    ToolCall,
    Tools,
    ToolSyntax,
    after_space,
    json_end,
    named_call,
    read_json,
    require_plain_names,
    write_json,
)

MARK = "[TOOL_CALLS]"

_MAY_BEGIN = re.compile(r"\s*[\w.\-]*\s*(?:\Z|[\[{])")
_HEAD = re.compile(r"([\w.\-]+)\s*(?:\[CALL_ID\]([\w\-]+))?(?:\[ARGS\])?\s*(?={)")


class Mistral(ToolSyntax):
    name = "mistral"
    marks = (MARK,)
    closers = ("]", "}")
    short_call_ids = True
    frame = CallFrame(
        begin=MARK + " [",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after="}",
        between=", ",
        end="]",
    )

    def may_begin(self, text: str) -> bool:
        return _MAY_BEGIN.match(text, len(MARK)) is not None

    def read(self, text: str, tools: Tools, ended: bool) -> Block | None:
        begin = after_space(text, len(MARK))
        return _read_list(text, begin) if text.startswith("[", begin) else _read_named(text, begin)

    def render(self, calls: Sequence[ToolCall]) -> str:
        if not all(call.written_id for call in calls):
            return super().render(calls)
        listed = [{"name": c.name, "arguments": c.arguments, "id": c.written_id} for c in calls]
        return f"{MARK} {write_json(listed)}"


class MistralNamed(Mistral):
    """The form of newer models."""

    name = "mistral_named"
    frame = CallFrame(before_name=MARK, before_arguments="[ARGS]")

    def render(self, calls: Sequence[ToolCall]) -> str:
        require_plain_names(calls)
        ids = [f"[CALL_ID]{call.written_id}" if call.written_id else "" for call in calls]
        pairs = zip(calls, ids, strict=True)
        return "".join(f"{MARK}{call.name}{mark}[ARGS]{write_json(call.arguments)}" for call, mark in pairs)


def _read_list(text: str, begin: int) -> Block | None:
    end = json_end(text, begin)
    if end is None:
        return None
    listed = read_json(text[begin:end])
    if not listed:
        raise ValueError("a list of calls must not be empty")
    return Block([_listed_call(call) for call in listed], end)


def _listed_call(call: Any) -> ToolCall:
    read = named_call(call, ("arguments",), frozenset(["id"]))
    written = call.get("id")
    if written is not None and not isinstance(written, str):
        raise ValueError("a call's id must be a text")
    return replace(read, written_id=written or None)


def _read_named(text: str, begin: int) -> Block | None:
    head = _HEAD.match(text, begin)
    if head is None:
        if "{" in text[begin:]:
            raise ValueError("a call must have a plain name")
        return None
    end = json_end(text, head.end())
    if end is None:
        return None
    arguments = read_json(text[head.end() : end])
    return Block([ToolCall(head[1], arguments, head[2])], end)
