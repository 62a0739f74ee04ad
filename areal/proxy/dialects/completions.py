"""OpenAI's Completions, which came before chat: a text or token ids go to the model as they are, without a template."""

from collections.abc import Sequence
from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.base import MAX_TOKENS, SSE_DONE, ParameterRules, openai_error, sse_data
from areal.proxy.dialects.chat import MAX_SEED, read_stream_options
from areal.proxy.dialects.sampling import STEERING, steering
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.types import Call, EventWriter, Reply, SampledToken, ToolCallEvent
from areal.trajectory.message import Message
from areal.utils.shorten import shown

HONOURED = frozenset(
    (
        *("model", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs"),
        *("stream", "stream_options", *STEERING),
    )
)
MEANINGLESS: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",), "best_of": (1,)}
"""Parameters that are not honoured, and the values by which they ask for nothing."""
DEFAULT_TOKENS = 16
"""The dialect's own default."""
MAX_ALTERNATIVES = 5

GROWING = ""


def parse(body: dict[str, Any], rules: ParameterRules, past: Sequence[Message] = ()) -> Call:
    """Raises ApiError 400 naming the parameter."""
    n = fields.integer(body, "n", 1, rules.max_choices) or 1
    rules.refuse_unsupported(body, HONOURED, {**MEANINGLESS, "best_of": (1, n)})
    alternatives = fields.integer(body, "logprobs", 0, MAX_ALTERNATIVES)
    limit = fields.integer(body, "max_tokens", 1, MAX_TOKENS)
    call = Call(
        messages=[],
        raw_prompt=_prompt(body.get("prompt")),
        id_prefix="cmpl-",
        model=fields.optional_text(body, "model") or "",
        n=n,
        max_tokens=DEFAULT_TOKENS if limit is None else limit,
        temperature=fields.number(body, "temperature", 0, 2),
        top_p=fields.top_p(body),
        stop=fields.texts(body, "stop"),
        seed=fields.integer(body, "seed", -MAX_SEED, MAX_SEED),
        logprobs=alternatives is not None,
        top_logprobs=alternatives or 0,
        steering=steering(body, rules),
        stream=fields.boolean(body, "stream", False),
    )
    read_stream_options(call, body)
    return call


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_token(token) for token in prompt):
        return prompt
    raise bad_request(f"prompt must be one text or one list of token ids, got {shown(prompt)}", "prompt")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_TOKENS


def render(call: Call, reply: Reply) -> dict[str, Any]:
    choices = []
    for number, completion in enumerate(reply.choices):
        logprobs = _logprobs(reply.tokens[number], 0) if reply.tokens else None
        choices.append(_choice(number, _said(completion.message), logprobs, completion.finish_reason))
    return {**_envelope(reply), "choices": choices, "usage": _usage(reply)}


def _said(message: Message) -> str:
    """Everything: here thinking is part of the text."""
    return str(message.get("reasoning_content", "")) + str(message["content"])


def _envelope(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "object": "text_completion", "created": reply.created, "model": reply.model}


def _choice(number: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: list[SampledToken], offset: int) -> dict[str, Any]:
    """`offset`: where in the answer the first of them begins."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.chance.text)
    return {
        "tokens": [token.chance.text for token in tokens],
        "token_logprobs": [token.chance.logprob for token in tokens],
        "top_logprobs": [{each.text: each.logprob for each in reversed(token.alternatives)} for token in tokens],
        "text_offset": offsets,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
    }


def writer(call: Call) -> EventWriter:
    return CompletionWriter(call)


class CompletionWriter:
    """Writes pieces of text, why each choice ended, and the usage if it was asked for."""

    def __init__(self, call: Call) -> None:
        self._usage: dict[str, Any] = {"usage": None} if call.stream_usage else {}
        self._envelope: dict[str, Any] = {}
        self._index = 0
        self._tokens: list[SampledToken] = []
        self._offsets = [0] * call.n
        """Characters of each choice whose tokens were told."""

    def begin(self, reply: Reply) -> bytes:
        self._envelope = _envelope(reply)
        return b""

    def text(self, text: str) -> bytes:
        return self._chunk(text)

    def reasoning(self, text: str) -> bytes:
        return self._chunk(text)

    def tool_call(self, call: ToolCallEvent) -> bytes:
        raise AssertionError("without tools nothing is a call")

    def tokens(self, tokens: list[SampledToken]) -> bytes:
        self._tokens += tokens
        return b""

    def choice(self, number: int) -> bytes:
        rest = self._chunk("") if self._tokens else b""
        self._index = number
        return rest

    def end(self, reply: Reply) -> bytes:
        last = []
        for number, completion in enumerate(reply.choices):
            last.append(self.choice(number) if number != self._index else b"")
            last.append(self._chunk("", completion.finish_reason))
        if self._usage:
            last.append(sse_data({**self._envelope, "choices": [], "usage": _usage(reply)}))
        return b"".join([*last, SSE_DONE])

    def failure(self, failure: ApiError) -> bytes:
        return sse_data(openai_error(failure))

    def _chunk(self, text: str, finish_reason: str | None = None) -> bytes:
        tokens, self._tokens = self._tokens, []
        logprobs = _logprobs(tokens, self._offsets[self._index]) if tokens else None
        self._offsets[self._index] += sum(len(token.chance.text) for token in tokens)
        choice = _choice(self._index, text, logprobs, finish_reason)
        return sse_data({**self._envelope, "choices": [choice], **self._usage})


error = openai_error
