"""OpenAI's Responses: a request read, an answer written whole or as a stream, and errors.

Conversations are lists of items there. An answer is several of them (thinking, a message, function calls) and one
message here, so the assistant's items join one turn until thinking or a second message begins the next.
"""

import itertools
import time
from collections.abc import Sequence
from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.base import (
    MAX_TOKENS,
    ContentParts,
    Images,
    ParameterRules,
    Tool,
    function_tool,
    openai_error,
    openai_format,
    openai_tool_choice,
    sse_event,
)
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.types import Call, EventWriter, Reply, ToolCallEvent
from areal.trajectory.message import Message, arguments_text, parse_arguments
from areal.utils.images import read_data_url
from areal.utils.shorten import shown

CONVERSATION = frozenset(
    ("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text")
)
SAMPLING = frozenset(("max_output_tokens", "temperature", "top_p"))
HONOURED = CONVERSATION | SAMPLING | {"stream", "include"}
HARMLESS = frozenset(("reasoning", "stream_options"))
"""`reasoning` sets the effort of hosted models: this one thinks as it was trained to."""
MEANINGLESS: dict[str, tuple[Any, ...]] = {"background": (False,), "top_logprobs": (0,), "truncation": ("disabled",)}
"""Parameters that are not honoured, and the values by which they ask for nothing."""

LOGPROBS = "message.output_text.logprobs"
ECHOED = (
    *("instructions", "metadata", "previous_response_id", "reasoning"),
    *("store", "text", "tool_choice", "tools", "user"),
)
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}

Item = dict[str, Any]


GROWING = ""


def parse(body: dict[str, Any], rules: ParameterRules, past: Sequence[Message] = ()) -> Call:
    """Raises ApiError 400 naming the parameter."""
    rules.refuse_unsupported(body, HONOURED | HARMLESS, MEANINGLESS)
    if LOGPROBS in (fields.texts(body, "include") or ()):
        rules.refuse_or_drop(
            "include", LOGPROBS, "may not ask for log-probabilities: only chat/completions reports them"
        )
    call = Call(
        messages=_messages(body, rules.images),
        id_prefix="resp_",
        model=fields.optional_text(body, "model") or "",
        instructions=fields.optional_text(body, "instructions"),
        continues=fields.optional_text(body, "previous_response_id"),
        tools=_tools(body, rules) or None,
        parallel_tool_calls=fields.boolean(body, "parallel_tool_calls", True),
        # `text.verbosity` is a hint for hosted models; `text.format` is honoured.
        response_format=openai_format(
            fields.mapping(fields.mapping(body, "text", "text"), "format", "text.format"), "text.format"
        ),
        format_param="text.format",
        max_tokens=fields.integer(body, "max_output_tokens", 1, MAX_TOKENS),
        temperature=fields.number(body, "temperature", 0, 2),
        top_p=fields.top_p(body),
        stream=fields.boolean(body, "stream", False),
        echo={name: body[name] for name in ECHOED if body.get(name) is not None},
    )
    openai_tool_choice(call, body, rules)
    return call


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
        elif kind == "function_call":
            self._open_turn().setdefault("tool_calls", []).append(_tool_call(item, where))
        elif kind == "function_call_output":
            self._close_turn()
            self.messages.append(_tool_result(item, where, self._images))
        elif kind == "reasoning":
            self._add_reasoning(item, where)
        else:
            raise bad_request(
                f"{where}.type must be message, function_call, function_call_output or reasoning, got {shown(kind)}",
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
    arguments = parse_arguments(fields.text(item, "arguments", f"{where}.arguments"))
    name = fields.text(item, "name", f"{where}.name")
    call_id = fields.text(item, "call_id", f"{where}.call_id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(item: Item, where: str, images: Images) -> Message:
    call_id = fields.text(item, "call_id", f"{where}.call_id")
    content = PARTS.content(item.get("output"), f"{where}.output", images)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _tools(body: dict[str, Any], rules: ParameterRules) -> list[Tool]:
    tools = []
    for place, tool in enumerate(fields.objects(body, "tools", "tools")):
        if tool.get("type") != "function":
            rules.refuse_or_drop("tools", tool.get("type"), "must be of type function: nothing else is served here")
            continue
        tools.append(function_tool(tool, "parameters", f"tools[{place}]"))
    return tools


def render(call: Call, reply: Reply) -> dict[str, Any]:
    return _response(call, reply, _output(reply))


def _response(call: Call, reply: Reply, output: list[Item]) -> dict[str, Any]:
    """Every field of the object, even if it says nothing here; a reply without choices is still in progress."""
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "completed_at": int(time.time()) if reply.choices else None,
        "status": _status(reply),
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if _truncated(reply) else None,
        "max_output_tokens": call.max_tokens,
        "model": reply.model,
        "output": output,
        "parallel_tool_calls": call.parallel_tool_calls,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "truncation": "disabled",
        "usage": _usage(reply) if reply.choices else None,
        **{"instructions": None, "metadata": {}, "previous_response_id": None, "reasoning": None, "user": None},
        **{"store": True, "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}},
        **call.echo,
    }


def _status(reply: Reply) -> str:
    if not reply.choices:
        return "in_progress"
    return "incomplete" if _truncated(reply) else "completed"


def _truncated(reply: Reply) -> bool:
    return any(choice.truncated for choice in reply.choices)


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
    }


def _output(reply: Reply) -> list[Item]:
    """Thinking, then the message, then the calls; an answer that says nothing is an empty message."""
    (completion,) = reply.choices
    name, message = _name(reply), completion.message
    calls = message.get("tool_calls", ())
    items = []
    if thought := message.get("reasoning_content"):
        items.append(_reasoning_item(name, thought, "completed"))
    if message["content"] or not calls:
        items.append(_message_item(name, [_text_part(message["content"])], _status(reply)))
    for number, call in enumerate(calls):
        function = call["function"]
        event = ToolCallEvent(number, call["id"], function["name"], arguments_text(function["arguments"]))
        items.append(_call_item(name, event, event.arguments, "completed"))
    return items


def _message_item(name: str, content: list[dict[str, Any]], status: str) -> Item:
    return {
        "id": f"msg_{name}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def _reasoning_item(name: str, thought: str | None, status: str) -> Item:
    content = [] if thought is None else [_reasoning_part(thought)]
    return {"id": f"rs_{name}", "type": "reasoning", "status": status, "summary": [], "content": content}


def _call_item(name: str, call: ToolCallEvent, arguments: str, status: str) -> Item:
    return {
        "id": f"fc_{name}_{call.number}",
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _name(reply: Reply) -> str:
    """What the ids of its items are made from."""
    return reply.id.removeprefix("resp_")


def writer(call: Call) -> EventWriter:
    return ResponseWriter(call)


class _TextItem:
    """An item whose text grows."""

    def __init__(self, item_id: str, index: int) -> None:
        self.id = item_id
        self.index = index
        self.text = ""
        self.closed = False


class ResponseWriter:
    """Adds every item, fills it and marks it done; the message stays open while calls are made."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._numbers = itertools.count()
        self._name = ""
        self._output: list[Item] = []
        """In order of appearance, each as it is known now."""
        self._reasoning: _TextItem | None = None
        self._message: _TextItem | None = None

    def begin(self, reply: Reply) -> bytes:
        self._name = _name(reply)
        snapshot = {"response": _response(self._call, reply, [])}
        return self._event("response.created", **snapshot) + self._event("response.in_progress", **snapshot)

    def text(self, text: str) -> bytes:
        opening = self._close_reasoning()
        if self._message is None:
            opening += self._open_message()
        assert self._message is not None
        self._message.text += text
        return opening + self._part_event("response.output_text.delta", self._message, delta=text, logprobs=[])

    def reasoning(self, text: str) -> bytes:
        opening = b""
        if self._reasoning is None:
            item = _reasoning_item(self._name, None, "in_progress")
            self._reasoning = _TextItem(item["id"], len(self._output))
            opening = self._add(item) + self._part_added(self._reasoning, _reasoning_part(""))
        self._reasoning.text += text
        return opening + self._part_event("response.reasoning_text.delta", self._reasoning, delta=text)

    def tool_call(self, call: ToolCallEvent) -> bytes:
        opening = self._close_reasoning()
        item = _call_item(self._name, call, "", "in_progress")
        index = len(self._output)
        place = {"item_id": item["id"], "output_index": index}
        return (
            opening
            + self._add(item)
            + self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
            + self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
            + self._done(index, _call_item(self._name, call, call.arguments, "completed"))
        )

    def end(self, reply: Reply) -> bytes:
        (completion,) = reply.choices
        ending = self._close_reasoning()
        if self._message is None and not completion.message.get("tool_calls"):
            ending += self._open_message()  # an answer that says nothing is an empty message
        status = _status(reply)
        ending += self._close_message(status)
        return ending + self._event(f"response.{status}", response=_response(self._call, reply, self._output))

    def failure(self, failure: ApiError) -> bytes:
        """Written twice: the documented event has the fields at its top, and SDKs raise if there is an `error`."""
        body = {"code": failure.code, "message": failure.message, "param": failure.param}
        return self._event("error", **body, error={"type": failure.kind, **body})

    def _open_message(self) -> bytes:
        item = _message_item(self._name, [], "in_progress")
        self._message = _TextItem(item["id"], len(self._output))
        return self._add(item) + self._part_added(self._message, _text_part(""))

    def _close_message(self, status: str) -> bytes:
        message = self._message
        if message is None:
            return b""
        part = _text_part(message.text)
        return (
            self._part_event("response.output_text.done", message, text=message.text, logprobs=[])
            + self._part_event("response.content_part.done", message, part=part)
            + self._done(message.index, _message_item(self._name, [part], status))
        )

    def _close_reasoning(self) -> bytes:
        reasoning = self._reasoning
        if reasoning is None or reasoning.closed:
            return b""
        reasoning.closed = True
        return (
            self._part_event("response.reasoning_text.done", reasoning, text=reasoning.text)
            + self._part_event("response.content_part.done", reasoning, part=_reasoning_part(reasoning.text))
            + self._done(reasoning.index, _reasoning_item(self._name, reasoning.text, "completed"))
        )

    def _add(self, item: Item) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _done(self, index: int, item: Item) -> bytes:
        self._output[index] = item
        return self._event("response.output_item.done", output_index=index, item=item)

    def _part_added(self, item: _TextItem, part: dict[str, Any]) -> bytes:
        return self._part_event("response.content_part.added", item, part=part)

    def _part_event(self, name: str, item: _TextItem, **values: Any) -> bytes:
        return self._event(name, item_id=item.id, output_index=item.index, content_index=0, **values)

    def _event(self, name: str, /, **values: Any) -> bytes:
        return sse_event(name, {"type": name, "sequence_number": next(self._numbers), **values})


def error(failure: ApiError) -> dict[str, Any]:
    return openai_error(failure)
