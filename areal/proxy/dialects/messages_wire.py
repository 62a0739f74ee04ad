"""The Message object of Anthropic, whole or where a stream begins, and its errors."""

from typing import Any

from areal.proxy.errors import ApiError
from areal.proxy.exchange import Call, Reply
from areal.trajectory.completion import Completion

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def message(call: Call, reply: Reply) -> dict[str, Any]:
    """Every field of the object; a reply without choices has said nothing yet."""
    completion = reply.choices[0] if reply.choices else None
    return {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [] if completion is None else _blocks(completion),
        **ending(call, completion),
        "usage": usage(reply),
    }


def ending(call: Call, completion: Completion | None) -> dict[str, Any]:
    stopped_at = None if completion is None else _stop_text(call, completion)
    return {"stop_reason": _stop_reason(completion, stopped_at), "stop_sequence": stopped_at}


def usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def error(failure: ApiError) -> dict[str, Any]:
    """`code` is ours: it names what the type leaves open, such as a conversation that is too long."""
    kind = ERROR_TYPES.get(failure.status, "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": failure.message}
    if failure.code is not None:
        body["code"] = failure.code
    if failure.param == "thread":  # by this, the SDK's tool runner goes on without threads
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body, "request_id": None}


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def tool_block(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _blocks(completion: Completion) -> list[dict[str, Any]]:
    said = completion.message
    calls = [
        tool_block(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in said.get("tool_calls", ())
    ]
    blocks = [thinking_block(said["reasoning_content"])] if said.get("reasoning_content") else []
    if said["content"] or not calls:
        blocks.append(text_block(said["content"]))
    return [*blocks, *calls]


def _stop_reason(completion: Completion | None, stopped_at: str | None) -> str | None:
    if completion is None:
        return None
    if completion.truncated:
        return "max_tokens"
    if completion.message.get("tool_calls"):
        return "tool_use"
    return "end_turn" if stopped_at is None else "stop_sequence"


def _stop_text(call: Call, completion: Completion) -> str | None:
    """The stop text that ended the answer: the one that stands first."""
    found = [(at, stop) for stop in call.stop or () if (at := completion.text.find(stop)) >= 0]
    return min(found)[1] if found else None
