"""Tool calls as Llama 3 writes them: the answer is `{"name": ..., "parameters": {...}}`, several joined by `;`.

`<|python_tag|>` may open a call. JSON at the beginning of an answer that is not a call is text, and so are calls in the
middle of text.
"""

from areal.trajectory.parsers.base import (
    Block,
    CallFrame,
    Tools,
    ToolSyntax,
    after_space,
    json_end,
    named_call,
    read_json,
)

PYTHON_TAG = "<|python_tag|>"
BEGINNINGS = ('{"name":', '{"parameters":', '{"arguments":', '{"type":')


class Llama3(ToolSyntax):
    name = "llama3"
    marks = (PYTHON_TAG,)
    bare = "{"
    closers = ("}",)
    frame = CallFrame(before_name='{"name": "', before_arguments='", "parameters": ', after="}", between="; ")

    def may_begin(self, text: str) -> bool:
        body = "".join(text.removeprefix(PYTHON_TAG).split())
        return any(begin.startswith(body[: len(begin)]) for begin in BEGINNINGS)

    def read(self, text: str, tools: Tools, ended: bool) -> Block | None:
        begin = after_space(text, len(PYTHON_TAG)) if text.startswith(PYTHON_TAG) else 0
        end = json_end(text, begin)
        if end is None:
            return None
        call = read_json(text[begin:end])
        if isinstance(call, dict) and call.get("type", "function") != "function":
            raise ValueError("a call must be of a function")
        return Block([named_call(call, ("parameters", "arguments"), frozenset(["type"]))], end)
