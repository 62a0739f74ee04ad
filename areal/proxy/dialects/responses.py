"""OpenAI's Responses: a request read. Its answers: response_answers.py.

Conversations are lists of items there. An answer is several of them (thinking, a message, function calls) and one
message here, so the assistant's items join one turn until thinking or a second message begins the next.
"""

from collections.abc import Sequence
from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.base import (
    MAX_TOKENS,
    ContentParts,
    Images,
    ParameterRules,
    openai_error,
    openai_format,
)
from areal.proxy.dialects.openai_tools import INPUT, read_tools
from areal.proxy.dialects.response_answers import Item, render, writer
from areal.proxy.dialects.sampling import MAX_TOP_LOGPROBS, THINKING, thinks
from areal.proxy.errors import bad_request
from areal.proxy.types import Call
from areal.trajectory.message import Message, parse_arguments
from areal.utils.images import read_data_url
from areal.utils.shorten import shown

__all__ = ["GROWING", "error", "parse", "render", "writer"]

CONVERSATION = frozenset(
    ("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text")
)
SAMPLING = frozenset(("max_output_tokens", "temperature", "top_p", "top_logprobs", "reasoning"))
HONOURED = CONVERSATION | SAMPLING | {"stream", "include", "truncation", "store"}
HARMLESS = frozenset(("stream_options",))
MEANINGLESS: dict[str, tuple[Any, ...]] = {"background": (False,)}
"""Parameters that are not honoured, and the values by which they ask for nothing."""

LOGPROBS = "message.output_text.logprobs"
ECHOED = (
    *("instructions", "metadata", "previous_response_id", "reasoning"),
    *("store", "text", "tool_choice", "tools", "top_logprobs", "truncation", "user"),
)
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}

GROWING = ""


def parse(body: dict[str, Any], rules: ParameterRules, past: Sequence[Message] = ()) -> Call:
    """Raises ApiError 400 naming the parameter."""
    rules.refuse_unsupported(body, HONOURED | HARMLESS, MEANINGLESS)
    logprobs = LOGPROBS in (fields.texts(body, "include") or ())
    alternatives = fields.integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    truncation = body.get("truncation")
    if truncation not in (None, "auto", "disabled"):
        raise bad_request(f"truncation must be auto or disabled, got {shown(truncation)}", "truncation")
    call = Call(
        messages=_messages(body, rules.images),
        id_prefix="resp_",
        model=fields.optional_text(body, "model") or "",
        instructions=fields.optional_text(body, "instructions"),
        continues=fields.optional_text(body, "previous_response_id"),
        parallel_tool_calls=fields.boolean(body, "parallel_tool_calls", True),
        # `text.verbosity` is a hint for hosted models; `text.format` is honoured.
        response_format=openai_format(
            fields.mapping(fields.mapping(body, "text", "text"), "format", "text.format"), "text.format"
        ),
        format_param="text.format",
        max_tokens=fields.integer(body, "max_output_tokens", 1, MAX_TOKENS),
        temperature=fields.number(body, "temperature", 0, 2),
        top_p=fields.top_p(body),
        logprobs=logprobs or alternatives > 0,
        top_logprobs=alternatives,
        truncates=truncation == "auto",
        thinks=_thinks(body, rules),
        stores=fields.boolean(body, "store", True),
        stream=fields.boolean(body, "stream", False),
        echo={name: body[name] for name in ECHOED if body.get(name) is not None},
    )
    read_tools(call, body, rules, nested=False)
    return call


def _thinks(body: dict[str, Any], rules: ParameterRules) -> bool | None:
    """`reasoning` also has wishes about summaries and hosted models' effort: this one thinks as it was trained to."""
    effort = fields.mapping(body, "reasoning", "reasoning").get("effort")
    known = rules.thinking_switch and isinstance(effort, str) and effort in THINKING
    return thinks(effort, "reasoning.effort", rules) if known else None


def _messages(body: dict[str, Any], images: Images) -> list[Message]:
    wire = body.get("input")
    if isinstance(wire, str):
        return [{"role": "user", "content": wire}]
    items = fields.objects(body, "input", "input")
    if not items:
        raise bad_request("input must be a text or hold at least one item, got none", "input")
    conversation = _Conversation(images)
    for place, item in enumerate(items):
        conversation.add(item, f"input[{place}]")
    return conversation.messages


class _Conversation:
    """Turns items into messages."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self.messages: list[Message] = []
        self._turn: Message | None = None
        """The assistant's turn that further items may join."""
        self._turn_has_message = False

    def add(self, item: Item, where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._add_message(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            self._open_turn().setdefault("tool_calls", []).append(_tool_call(item, where))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._close_turn()
            self.messages.append(_tool_result(item, where, self._images))
        elif kind == "reasoning":
            self._add_reasoning(item, where)
        else:
            raise bad_request(
                f"{where}.type must be message, function_call, function_call_output, custom_tool_call, "
                f"custom_tool_call_output or reasoning, got {shown(kind)}",
                where,
            )

    def _add_message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{where}.role")
        if role == "user":
            self._close_turn()
            content = PARTS.content(item.get("content"), f"{where}.content", self._images)
            self.messages.append({"role": role, "content": content})
            return
        text = PARTS.text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._close_turn()
            self.messages.append({"role": ROLES[role], "content": text})
            return
        if self._turn_has_message:
            self._close_turn()
        self._open_turn()["content"] = text
        self._turn_has_message = True

    def _add_reasoning(self, item: Item, where: str) -> None:
        """Thinking is text here; what another service encrypted cannot be read and is left out."""
        self._close_turn()
        thought = REASONING_PARTS.text(item.get("content") or item.get("summary") or [], f"{where}.content")
        if thought:
            self._open_turn()["reasoning_content"] = thought

    def _open_turn(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def _close_turn(self) -> None:
        self._turn, self._turn_has_message = None, False


def _image(part: dict[str, Any], where: str) -> bytes:
    if part.get("file_id") is not None:
        raise bad_request(f"{where}.file_id is not supported; send image_url with a data URL", where)
    return read_data_url(fields.text(part, "image_url", f"{where}.image_url"))


PARTS = ContentParts(
    {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}, "input_image", _image
)
REASONING_PARTS = ContentParts({"reasoning_text": "text", "summary_text": "text", "text": "text"})


def _tool_call(item: Item, where: str) -> dict[str, Any]:
    arguments: Any
    if item["type"] == "custom_tool_call":
        arguments = {INPUT: fields.text(item, "input", f"{where}.input")}
    else:
        arguments = parse_arguments(fields.text(item, "arguments", f"{where}.arguments"))
    name = fields.text(item, "name", f"{where}.name")
    call_id = fields.text(item, "call_id", f"{where}.call_id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(item: Item, where: str, images: Images) -> Message:
    call_id = fields.text(item, "call_id", f"{where}.call_id")
    content = PARTS.content(item.get("output"), f"{where}.output", images)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


error = openai_error
