"""Sampled ids read as a message: the text without its end token, its thinking, and the tool calls in it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.io_struct import ModelResponse
from areal.trajectory.message import Message
from areal.trajectory.parsers import ToolCall
from areal.trajectory.parsers.base import Tools
from areal.trajectory.rendering import Renderer


@dataclass
class Answer:
    message: Message
    text: str
    """Everything sampled but the end token, as text."""
    end_id: int | None
    """The stop token at the end, if the model sampled one."""


def read_answer(
    renderer: Renderer,
    response: ModelResponse,
    *,
    completion_id: str,
    stop_ids: Collection[int],
    stop_texts: Sequence[str] = (),
    tools: Tools | None = None,
    thinking: bool = False,
    cut: bool = False,
) -> Answer:
    """`tools` and `thinking` are the prompt's: without tools nothing is a call. `cut` = what may be the beginning of a
    call at the end is not shown."""
    text, end_id = answer_text(renderer, response, stop_ids)
    parsed = renderer.format.read(before_stop(text, stop_texts), tools, thinking=thinking, cut=cut)
    content = text if parsed.content == text else parsed.content  # one string where both are equal, not two
    message: Message = {"role": "assistant", "content": content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [tool_call(call, completion_id, number) for number, call in enumerate(parsed.calls)]
    return Answer(message, text, end_id)


def answer_text(renderer: Renderer, response: ModelResponse, stop_ids: Collection[int]) -> tuple[str, int | None]:
    """Everything sampled but the end token, and that token if the model sampled one."""
    ids = response.output_tokens
    ended = response.stop_reason == "stop" and bool(ids) and ids[-1] in stop_ids
    return (renderer.decode(ids[:-1]), ids[-1]) if ended else (renderer.decode(ids), None)


def before_stop(text: str, stop_texts: Sequence[str]) -> str:
    """A stop text ends the answer and is not part of it, though its tokens were sampled and are kept."""
    found = [at for at in (text.find(stop) for stop in stop_texts) if at >= 0]
    return text[: min(found)] if found else text


def tool_call(call: ToolCall, completion_id: str, number: int) -> dict[str, Any]:
    """The `number`-th call of an answer. Its id is unique, and ends with the id that the model wrote, if any."""
    written = f"_{call.written_id}" if call.written_id else ""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{completion_id}_{number}{written}", "type": "function", "function": function}
