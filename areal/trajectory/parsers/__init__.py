"""Sampled text read as thinking, text and tool calls: one file per way that models write calls.

    format = detect(chat_template)                      # or choose(template, tool_parser="hermes"): AnswerFormat
    parsed = format.read(text, tools, thinking=False)   # ParsedAnswer: content, reasoning, calls
    reader = format.reader(tools, thinking=False)       # the same for a stream
    events = reader.feed(piece) … reader.finish()       # Text | Reasoning | ToolCall, in order
    text = format.calls.render([ToolCall(name, arguments)])

`tools` None = nothing is a call. `thinking` = the prompt ended inside thinking (`Prompt.thinking`). Partial marks are
held back; a call comes out whole or, if it is malformed, as text. The joined events of a stream equal what `read` makes
of the whole text, however it was cut. `Renderer.format` is the format of its tokenizer's template.
"""

from areal.trajectory.parsers.base import Event, ParsedAnswer, Reasoning, Text, ToolCall
from areal.trajectory.parsers.reader import AnswerFormat, AnswerReader
from areal.trajectory.parsers.registry import choose, detect

__all__ = ["AnswerFormat", "AnswerReader", "Event", "ParsedAnswer", "Reasoning", "Text", "ToolCall", "choose", "detect"]
