"""The parts of a Chat Completions answer that a whole one and a streamed one share."""

from typing import Any

from areal.proxy.exchange import Reply
from areal.trajectory.completion import Completion
from areal.trajectory.meaning import Message, arguments_text


def envelope(reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": None,
    }


def usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def choice(reply: Reply, number: int) -> dict[str, Any]:
    completion = reply.choices[number]
    return {
        "index": number,
        "message": _message(completion.message),
        "logprobs": logprobs(reply, number),
        "finish_reason": finish_reason(completion),
    }


def finish_reason(completion: Completion) -> str:
    if completion.truncated:
        return "length"
    return "tool_calls" if completion.message.get("tool_calls") else "stop"


def logprobs(reply: Reply, number: int) -> dict[str, Any] | None:
    """Of what the client sees: the end token is no part of it."""
    if not reply.tokens:
        return None
    completion, texts = reply.choices[number], reply.tokens[number]
    seen = len(texts) - (completion.end_id is not None)
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts[:seen], completion.logprobs.tolist()[:seen], strict=True)
    ]
    return {"content": content, "refusal": None}


def _message(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": "assistant", "content": message["content"], "refusal": None}
    if reasoning := message.get("reasoning_content"):
        wire["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        wire["content"] = message["content"] or None
        wire["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_text(call["function"]["arguments"])}}
            for call in calls
        ]
    return wire
