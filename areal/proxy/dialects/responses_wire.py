"""The Response object and the items in it, whole or while they are streamed."""

import time
from typing import Any

from areal.proxy.exchange import Call, CallMade, Reply
from areal.trajectory.meaning import arguments_text

Item = dict[str, Any]


def response(call: Call, reply: Reply, output: list[Item]) -> dict[str, Any]:
    """Every field of the object, whether or not it says anything; a reply without choices is still in progress."""
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


def output_items(reply: Reply) -> list[Item]:
    """Thinking, then the message, then the calls; an answer that says nothing is an empty message."""
    (completion,) = reply.choices
    message = completion.message
    calls = message.get("tool_calls", ())
    items = []
    if thought := message.get("reasoning_content"):
        items.append(reasoning_item(reply, thought, "completed"))
    status = "incomplete" if completion.truncated else "completed"
    if message["content"] or not calls:
        items.append(message_item(reply, [text_part(message["content"])], status))
    for number, call in enumerate(calls):
        function = call["function"]
        made = CallMade(number, call["id"], function["name"], arguments_text(function["arguments"]))
        items.append(call_item(reply, made, made.arguments, "completed"))
    return items


def message_item(reply: Reply, content: list[dict[str, Any]], status: str) -> Item:
    return {
        "id": f"msg_{_name(reply)}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def reasoning_item(reply: Reply, thought: str | None, status: str) -> Item:
    content = [] if thought is None else [thought_part(thought)]
    return {"id": f"rs_{_name(reply)}", "type": "reasoning", "status": status, "summary": [], "content": content}


def call_item(reply: Reply, call: CallMade, arguments: str, status: str) -> Item:
    return {
        "id": f"fc_{_name(reply)}_{call.number}",
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _name(reply: Reply) -> str:
    return reply.id.removeprefix("resp_")


def _truncated(reply: Reply) -> bool:
    return any(choice.truncated for choice in reply.choices)


def _status(reply: Reply) -> str:
    if not reply.choices:
        return "in_progress"
    return "incomplete" if _truncated(reply) else "completed"


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
    }
