"""Tool calls as DeepSeek writes them: a list between special tokens, its arguments fenced (V3, R1) or bare (V3.1)."""

import re

from areal.trajectory.parsers.base import (
    Block,
    CallFrame,
    ToolCall,
    Tools,
    ToolSyntax,
    after_mark,
    after_space,
    json_end,
    read_json,
)

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"

_FENCED = re.compile(rf"function{re.escape(SEPARATOR)}([^\s<{{`]+)\n{FENCE}json\n(?={{)")
_BARE = re.compile(rf"([^\s<{{`]+){re.escape(SEPARATOR)}(?={{)")


class DeepSeek(ToolSyntax):
    name = "deepseek"
    marks = (CALLS_BEGIN,)
    closers = (CALLS_END,)
    call_end = CALL_END
    frame = CallFrame(
        begin=CALLS_BEGIN,
        before_name=f"{CALL_BEGIN}function{SEPARATOR}",
        before_arguments=f"\n{FENCE}json\n",
        after=f"\n{FENCE}{CALL_END}",
        between="\n",
        end=CALLS_END,
    )

    def may_begin(self, text: str) -> bool:
        return CALL_BEGIN.startswith(text[len(CALLS_BEGIN) :].lstrip()[: len(CALL_BEGIN)])

    def read(self, text: str, tools: Tools, ended: bool) -> Block | None:
        calls: list[ToolCall] = []
        at = len(CALLS_BEGIN)
        while text.startswith(CALL_BEGIN, at := after_space(text, at)):
            found = _call(text, at + len(CALL_BEGIN))
            if found is None:
                return None
            call, at = found
            calls.append(call)
        if calls and ended and at == len(text):
            return Block(calls, at)  # stopped after a whole call: the end of the list would add nothing
        end = after_mark(text, at, CALLS_END)
        if end is not None and not calls:
            raise ValueError("a list of calls must not be empty")
        return None if end is None else Block(calls, end)


class DeepSeekBare(DeepSeek):
    """The form of V3.1 and later."""

    name = "deepseek_bare"
    frame = CallFrame(
        begin=CALLS_BEGIN, before_name=CALL_BEGIN, before_arguments=SEPARATOR, after=CALL_END, end=CALLS_END
    )


def _call(text: str, at: int) -> tuple[ToolCall, int] | None:
    head = _FENCED.match(text, at) or _BARE.match(text, at)
    if head is None:
        if "{" in text[at:]:
            raise ValueError("a call must have a name and arguments")
        return None
    end = json_end(text, head.end())
    if end is None:
        return None
    call = ToolCall(head[1], read_json(text[head.end() : end]))
    if head.re is _FENCED:
        after = after_mark(text, end, FENCE)
        if after is None:
            return None
        end = after
    after = after_mark(text, end, CALL_END)
    return None if after is None else (call, after)
