"""The span of a call of the model, for an episode that is traced (`areal/infra/tracing.py`)."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from areal.infra.tracing import CANCELLED, Attributes, CallSpan, EpisodeTrace
from areal.proxy.errors import ApiError
from areal.proxy.types import Call, Event, Reply


async def traced(
    trace: EpisodeTrace, conversation: str, model: str, call: Call, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[Event, None]:
    """The same events. A retry that shares an answer makes no second span, since nothing is generated for it."""
    operation = "chat" if call.raw_prompt is None else "text_completion"
    trace.sessions.add(conversation)
    span = trace.begin_call(operation, model, conversation, _results(call), _request(call))
    began = False
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Reply) and event.choices:
                    _end(span, event)
                elif not began:
                    span.first_chunk()
                    began = True
                yield event
    except BaseException as error:
        span.failed(*_failure(error))
        raise


def _failure(error: BaseException) -> tuple[str, str]:
    if isinstance(error, ApiError):
        return error.code or str(error.status), error.message
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return CANCELLED, ""
    return type(error).__name__, ""


def _results(call: Call) -> Iterator[str]:
    return (message["tool_call_id"] for message in call.messages if message.get("tool_call_id"))


def _request(call: Call) -> Attributes:
    known = {
        "gen_ai.request.max_tokens": call.max_tokens,
        "gen_ai.request.temperature": call.temperature,
        "gen_ai.request.top_p": call.top_p,
        "gen_ai.request.top_k": call.top_k,
        "gen_ai.request.seed": call.seed,
        "gen_ai.request.stop_sequences": call.stop,
        "gen_ai.request.choice.count": call.n if call.n != 1 else None,
        "gen_ai.request.stream": True if call.stream else None,
        "gen_ai.output.type": None if call.response_format is None else "json",
    }
    return {name: value for name, value in known.items() if value is not None}


def _end(span: CallSpan, reply: Reply) -> None:
    calls = [each for choice in reply.choices for each in choice.message.get("tool_calls") or ()]
    span.answered(
        reply.prompt_tokens,
        reply.output_tokens,
        [choice.finish_reason for choice in reply.choices],
        {version for choice in reply.choices for version in choice.versions.tolist()},
        [(each["id"], each["function"]["name"]) for each in calls],
        {"gen_ai.response.id": reply.id, "gen_ai.response.model": reply.model},
    )
