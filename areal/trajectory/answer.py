"""Sampled ids read as a message: the text without its end, and the tool calls in it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.io_struct import ModelResponse
from areal.trajectory.meaning import Message
from areal.trajectory.renderer import Renderer

ToolParser = Callable[[str], tuple[str, list[tuple[str, dict[str, Any]]]]]


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
    parser: ToolParser | None = None,
) -> Answer:
    """`parser` is None where the caller offered no tools: then nothing is a call."""
    ids = response.output_tokens
    ended = response.stop_reason == "stop" and bool(ids) and ids[-1] in stop_ids
    text = renderer.decode(ids[:-1] if ended else ids)
    content = _before_stop(text, stop_texts)
    content, calls = (content, []) if parser is None else parser(content)
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            _tool_call(f"call_{completion_id}_{number}", *call) for number, call in enumerate(calls)
        ]
    return Answer(message, text, ids[-1] if ended else None)


def _before_stop(text: str, stop_texts: Sequence[str]) -> str:
    """A stop text ends the answer and is no part of it, though its tokens were sampled and are kept."""
    found = [at for at in (text.find(stop) for stop in stop_texts) if at >= 0]
    return text[: min(found)] if found else text


def _tool_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
