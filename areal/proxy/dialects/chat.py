"""OpenAI's Chat Completions. A parameter is honoured, harmless, or refused by name; none is ignored in silence."""

from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.chat_messages import parse_messages
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.exchange import Call, Reply
from areal.trajectory.completion import Completion
from areal.trajectory.meaning import Message, arguments_text

CONVERSATION = frozenset(("model", "messages", "tools", "tool_choice", "parallel_tool_calls"))
SAMPLING = frozenset(("n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed", "logprobs"))
HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Bookkeeping of the hosted service; no answer depends on it."""

HONOURED = CONVERSATION | SAMPLING | HARMLESS

MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
"""Parameters that are not honoured, and the values by which they ask for nothing."""

MAX_SEED = 2**63 - 129


def parse(body: dict[str, Any], max_choices: int) -> Call:
    """Raises ApiError 400 naming the parameter."""
    _refuse_unsupported(body)
    tools = _tools(body)
    limit = fields.integer(body, "max_completion_tokens", 1, 2**31)
    return Call(
        messages=parse_messages(body),
        model=fields.text(body, "model", "model") if body.get("model") is not None else "",
        tools=tools,
        parallel_tool_calls=fields.boolean(body, "parallel_tool_calls", True),
        n=fields.integer(body, "n", 1, max_choices) or 1,
        max_tokens=fields.integer(body, "max_tokens", 1, 2**31) if limit is None else limit,
        temperature=fields.number(body, "temperature", 0, 2),
        top_p=_top_p(body),
        stop=_stop(body),
        seed=fields.integer(body, "seed", -MAX_SEED, MAX_SEED),
        logprobs=fields.boolean(body, "logprobs", False),
    )


def render(reply: Reply) -> dict[str, Any]:
    """Every field that some client depends on, whether or not it says anything."""
    sampled = sum(len(choice.output_ids) for choice in reply.choices)
    return {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [_choice(reply, number) for number in range(len(reply.choices))],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": reply.prompt_tokens + sampled,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        },
        "system_fingerprint": None,
    }


def error(failure: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": failure.message,
            "type": failure.kind,
            "param": failure.param,
            "code": failure.code,
        }
    }


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if value is None or name in HONOURED:
            continue
        if value not in MEANINGLESS.get(name, ()):
            raise bad_request(f"{name} is not supported, got {value!r:.200}; leave it out", name)


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools the model may call: none of them if the client chooses `none`."""
    tools = fields.objects(body, "tools", "tools")
    for place, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad_request(f"tools[{place}] must be of type function, got {tool.get('type')!r}", "tools")
        fields.text(function, "name", f"tools[{place}].function.name")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise bad_request(f"tool_choice must be auto or none, got {choice!r:.200}", "tool_choice")
    return tools if tools and choice != "none" else None


def _top_p(body: dict[str, Any]) -> float | None:
    top_p = fields.number(body, "top_p", 0, 1)
    if top_p == 0:
        raise bad_request("top_p must be above 0, got 0; use temperature 0 for the likeliest token", "top_p")
    return top_p


def _stop(body: dict[str, Any]) -> list[str] | None:
    stop = body.get("stop")
    if stop is None:
        return None
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise bad_request(f"stop must be a text or a list of texts, none of them empty, got {stop!r:.200}", "stop")
    return texts


def _choice(reply: Reply, number: int) -> dict[str, Any]:
    completion = reply.choices[number]
    return {
        "index": number,
        "message": _message(completion.message),
        "logprobs": _logprobs(completion, reply.tokens[number]) if reply.tokens else None,
        "finish_reason": _finish_reason(completion),
    }


def _message(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": "assistant", "content": message["content"], "refusal": None}
    if calls := message.get("tool_calls"):
        wire["content"] = message["content"] or None
        wire["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_text(call["function"]["arguments"])}}
            for call in calls
        ]
    return wire


def _finish_reason(completion: Completion) -> str:
    if completion.truncated:
        return "length"
    return "tool_calls" if completion.message.get("tool_calls") else "stop"


def _logprobs(completion: Completion, texts: list[str]) -> dict[str, Any]:
    """Of what the client sees: the end token is no part of it."""
    seen = len(texts) - (completion.end_id is not None)
    logprobs = completion.logprobs.tolist()
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts[:seen], logprobs[:seen], strict=True)
    ]
    return {"content": content, "refusal": None}
