"""Does a chat template only ever append? Where it does not, a conversation forks: see `rendering.py`.

A small conversation is played with answers as the model would write them: a plain one, a tool call, and each again
after thinking. After each turn the question is the proxy's own: which text does the next turn add to the recorded one?
"""

from collections.abc import Iterator
from dataclasses import dataclass

from areal.api.errors import RequestError
from areal.trajectory.message import Message
from areal.trajectory.parsers.base import ToolCall, Tools
from areal.trajectory.rendering import Renderer

THOUGHT = "they want a number"
CALL = ToolCall("look_up", {"word": "apple"})
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": CALL.name,
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]
QUESTION: Message = {"role": "user", "content": "how many apples?"}
NEXT_QUESTION: Message = {"role": "user", "content": "and pears?"}


@dataclass
class RecordedTurn:
    """An answer as it was recorded; a `Parent` of the next one."""

    message: Message
    text: str
    end_id: int | None
    tools: Tools | None
    thinking: bool
    depth: int = 1


@dataclass(frozen=True)
class Continuation:
    """One way a conversation goes on."""

    name: str
    appends: bool | None
    """None = the template refuses such messages."""


def continuations(renderer: Renderer) -> Iterator[Continuation]:
    """Each way in turn, those with thinking only if the model marks its thinking."""
    for thought in ("", THOUGHT) if renderer.format.reasoning is not None else ("",):
        after = " after thinking" if thought else ""
        yield _played(renderer, f"a question{after}", _answer(thought, "three"), None, [NEXT_QUESTION])
        call = _calling(thought)
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "a fruit"}
        yield _played(renderer, f"a tool's result{after}", call, TOOLS, [result])


def _played(renderer: Renderer, name: str, message: Message, tools: Tools | None, newer: list[Message]) -> Continuation:
    try:
        prompt = renderer.plain(renderer.render([QUESTION], tools))
        thinking = renderer.opens_thinking(prompt)
        end = next(iter(renderer.turn_end_ids), None)
        turn = RecordedTurn(message, _written(renderer, message, thinking), end, tools, thinking)
        return Continuation(name, renderer.added_text(turn, [QUESTION], newer, tools) is not None)
    except (RequestError, ValueError):  # of the template, and of a syntax that cannot express the call
        return Continuation(name, None)


def _answer(thought: str, content: str) -> Message:
    message: Message = {"role": "assistant", "content": content}
    return {**message, "reasoning_content": thought} if thought else message


def _calling(thought: str) -> Message:
    function = {"name": CALL.name, "arguments": CALL.arguments}
    return {**_answer(thought, ""), "tool_calls": [{"id": "call00001", "type": "function", "function": function}]}


def _written(renderer: Renderer, message: Message, thinking: bool) -> str:
    """What the model would have sampled."""
    text = renderer.format.calls.render([CALL]) if "tool_calls" in message else str(message["content"])
    marks, thought = renderer.format.reasoning, str(message.get("reasoning_content", ""))
    if marks is None:
        return text
    if thinking:  # the template has written the opening mark
        return marks.render(thought, text).removeprefix(marks.open)
    return marks.render(thought, text) if thought else text
