"""OpenAI's Responses: an answer written, whole or as a stream. What is one message here is several items there."""

import itertools
from collections.abc import Sequence
from typing import Any

from areal.proxy.dialects.base import sse_event
from areal.proxy.dialects.openai_tools import input_of
from areal.proxy.dialects.sampling import token_object
from areal.proxy.errors import ApiError
from areal.proxy.types import Call, EventWriter, Reply, SampledToken, ToolCallEvent
from areal.trajectory.message import arguments_text, parse_arguments

Item = dict[str, Any]


def render(call: Call, reply: Reply) -> dict[str, Any]:
    return _response(call, reply, _output(call, reply))


def _response(call: Call, reply: Reply, output: list[Item]) -> dict[str, Any]:
    """Every field of the object, even if it says nothing here; a reply without choices is still in progress."""
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "completed_at": reply.completed if reply.choices else None,
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
        **({"usage": _usage(reply)} if reply.choices else {}),
        **{"instructions": None, "metadata": {}, "previous_response_id": None, "reasoning": None},
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


def _output(call: Call, reply: Reply) -> list[Item]:
    """Thinking, then the message, then the calls; an answer that says nothing is an empty message."""
    (completion,) = reply.choices
    name, message = _name(reply), completion.message
    told = [token for token in reply.tokens[0] if token.of_text] if reply.tokens else []
    calls = message.get("tool_calls", ())
    items = []
    if thought := message.get("reasoning_content"):
        items.append(_reasoning_item(name, thought, "completed"))
    if message["content"] or not calls:
        items.append(_message_item(name, [_text_part(message["content"], told)], _status(reply)))
    for number, made in enumerate(calls):
        function = made["function"]
        event = ToolCallEvent(number, made["id"], function["name"], arguments_text(function["arguments"]))
        items.append(_call_item(name, event, "completed", custom=event.name in call.custom_tools))
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


def _call_item(name: str, call: ToolCallEvent, status: str, *, custom: bool) -> Item:
    """A call in progress says with what it is made when it is completed."""
    known = call.arguments if status == "completed" else ""
    if custom:
        kind, prefix, how = "custom_tool_call", "ctc", {"input": input_of(parse_arguments(known)) if known else ""}
    else:
        kind, prefix, how = "function_call", "fc", {"arguments": known}
    item_id = f"{prefix}_{name}_{call.number}"
    return {"id": item_id, "type": kind, "status": status, "call_id": call.id, "name": call.name, **how}


def _text_part(text: str, tokens: Sequence[SampledToken] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(tokens)}


def _logprobs(tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
    return [
        {**token_object(token.chance), "top_logprobs": [token_object(each) for each in token.alternatives]}
        for token in tokens
    ]


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
        self.tokens: list[SampledToken] = []
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
        self._tokens: list[SampledToken] = []
        """What the next part is made of."""

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
        told = [token for token in self._taken() if token.of_text]
        self._message.tokens += told
        logprobs = _logprobs(told)
        return opening + self._part_event("response.output_text.delta", self._message, delta=text, logprobs=logprobs)

    def reasoning(self, text: str) -> bytes:
        opening = b""
        if self._reasoning is None:
            item = _reasoning_item(self._name, None, "in_progress")
            self._reasoning = _TextItem(item["id"], len(self._output))
            opening = self._add(item) + self._part_added(self._reasoning, _reasoning_part(""))
        self._reasoning.text += text
        self._taken()
        return opening + self._part_event("response.reasoning_text.delta", self._reasoning, delta=text)

    def tool_call(self, call: ToolCallEvent) -> bytes:
        opening = self._close_reasoning()
        self._taken()
        custom = call.name in self._call.custom_tools
        item = _call_item(self._name, call, "in_progress", custom=custom)
        done = _call_item(self._name, call, "completed", custom=custom)
        index = len(self._output)
        place = {"item_id": item["id"], "output_index": index}
        added = opening + self._add(item)
        if custom:
            grown = self._event("response.custom_tool_call_input.delta", **place, delta=done["input"])
            grown += self._event("response.custom_tool_call_input.done", **place, input=done["input"])
        else:
            grown = self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
            whole = {"name": call.name, "arguments": call.arguments}
            grown += self._event("response.function_call_arguments.done", **place, **whole)
        return added + grown + self._done(index, done)

    def tokens(self, tokens: list[SampledToken]) -> bytes:
        self._tokens += tokens
        return b""

    def choice(self, number: int) -> bytes:
        return b""

    def _taken(self) -> list[SampledToken]:
        taken, self._tokens = self._tokens, []
        return taken

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
        part = _text_part(message.text, message.tokens)
        return (
            self._part_event("response.output_text.done", message, text=message.text, logprobs=part["logprobs"])
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
