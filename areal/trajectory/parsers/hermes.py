"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A block that is not exactly that stays text: the agent sees what the model wrote, and nothing is repaired into a call.
"""

from areal.trajectory.parsers.base import (
    Block,
    CallFrame,
    Tools,
    ToolSyntax,
    after_mark,
    after_space,
    json_end,
    named_call,
    read_json,
)

CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"


class Hermes(ToolSyntax):
    name = "hermes"
    marks = (CALL_BEGIN,)
    closers = (CALL_END,)
    call_end = CALL_END
    frame = CallFrame(
        before_name='<tool_call>\n{"name": "',
        before_arguments='", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
    )

    def may_begin(self, text: str) -> bool:
        return text[len(CALL_BEGIN) :].lstrip()[:1] in ("", "{")

    def read(self, text: str, tools: Tools, ended: bool) -> Block | None:
        begin = after_space(text, len(CALL_BEGIN))
        end = json_end(text, begin)
        if end is None:
            return None
        call = named_call(read_json(text[begin:end]), ("arguments",))
        after = after_mark(text, end, CALL_END)
        return None if after is None else Block([call], after)
