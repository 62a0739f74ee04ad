"""OpenTelemetry spans of episodes, in the words of its GenAI conventions (docs/tracing.md).

An episode is a span `invoke_agent`, with a span for each call of its model, one for each tool whose result comes back
with a later call, and its reward as an event. Spans hold numbers and names, and no text of a conversation.

Off unless `rollout.tracing` is true: then nothing of OpenTelemetry is imported, `current()` is None, and a call of the
model pays for one comparison. Whoever has a model called asks `current()` when its episode begins, because the calls
themselves may come over the network, where no context follows them.
"""

import asyncio
import os
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, TypeVar

from areal.api.errors import ConfigError, RejectReason
from areal.api.messages import Episode, Rejection
from areal.utils.background import in_thread
from areal.utils.installing import install_hint
from areal.utils.logging import getLogger

PROVIDER = "areal"
"""What the conventions call a provider: who answers."""
FLUSH_SECONDS = 4.0
"""For what has not been sent when a worker ends, which is killed a second later."""
MOST_NAME = 128
"""Characters of a name that a model or a client may have made up."""
CANCELLED = "cancelled"
ACCEPTED = "accepted"

T = TypeVar("T")
Attributes = Mapping[str, str | bool | int | float | Sequence[str] | Sequence[int]]

_current: ContextVar["EpisodeTrace | None"] = ContextVar("areal_trace", default=None)


def current() -> "EpisodeTrace | None":
    """That of the episode which this code runs for; None = it is not traced."""
    return _current.get()


@contextmanager
def of(trace: "EpisodeTrace | None") -> Iterator[None]:
    """Run code for an episode that began elsewhere."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


def require_installed() -> None:
    """Raises ConfigError, with the remedy."""
    try:
        found = find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(f"rollout.tracing=true needs OpenTelemetry's SDK and its exporter; {install_hint('otel')}")


class Tracing:
    """Makes the spans of a process and sends them off."""

    def __init__(self, provider: Any, *, owned: bool) -> None:
        """`owned` = it ends with this object."""
        from opentelemetry import trace

        self._trace = trace
        self._tracer = provider.get_tracer("areal")
        self._owned = provider if owned else None

    @classmethod
    def start(cls) -> "Tracing":
        """With the provider that the process has, if somebody set one up; else with one that sends spans by OTLP to
        where OpenTelemetry's own environment variables say. Agents' own spans then go there too, inside of ours.

        Raises ConfigError if something is not installed, or if a variable has a value that OpenTelemetry refuses.
        """
        require_installed()
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        known = trace.get_tracer_provider()
        if isinstance(known, TracerProvider):
            return cls(known, owned=False)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        try:
            # `aclose` ends it; the SDK's own end, when Python exits, would wait a second time.
            provider = TracerProvider(resource=Resource.create(_service(os.environ)), shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        except ValueError as error:
            raise ConfigError(f"rollout.tracing=true: {error}; change the variable OTEL_... that says so") from None
        trace.set_tracer_provider(provider)
        return cls(provider, owned=True)

    async def aclose(self) -> None:
        """Send what has not been sent yet; what no collector takes is dropped."""
        if self._owned is None:
            return
        try:
            await asyncio.wait_for(in_thread(self._owned.shutdown), FLUSH_SECONDS)
        except TimeoutError:
            getLogger("tracing").warning("the last spans could not be sent within %g s", FLUSH_SECONDS)

    async def episode(
        self,
        played: Coroutine[Any, Any, tuple[Episode | Rejection, T]],
        *,
        agent: str,
        task_id: int,
        sample: int,
        is_eval: bool,
    ) -> tuple[Episode | Rejection, T]:
        """Play it in a span of its own, which is the parent of spans that its agent makes."""
        about = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.agent.name": agent,
            "areal.task.id": task_id,
            "areal.sample": sample,
            "areal.evaluation": is_eval,
        }
        # What an agent raises is the rejection's, and what cancels an episode from outside is no fault of it.
        with (
            self._tracer.start_as_current_span(
                f"invoke_agent {agent}", attributes=about, record_exception=False, set_status_on_exception=False
            ) as span,
            of(EpisodeTrace(self._trace, self._tracer, span)),
        ):
            trace = current()
            assert trace is not None
            try:
                outcome, rest = await played
            except asyncio.CancelledError:
                trace.fail(CANCELLED, "")
                raise
            trace.end(outcome)
            return outcome, rest


class EpisodeTrace:
    """The span of one episode, and what is made inside of it."""

    def __init__(self, api: Any, tracer: Any, span: Any) -> None:
        self._api = api
        self._tracer = tracer
        self._span = span
        self._context = api.set_span_in_context(span)
        self.sessions: set[str] = set()
        """Of the proxy, opened by this episode: their calls have spans already when they reach the engine."""
        self._asked_tools: dict[str, tuple[str, int]] = {}
        """Tools that answers asked for: the call's id -> its name and when, in nanoseconds."""
        self._input_tokens = 0
        self._output_tokens = 0

    def begin_call(
        self, operation: str, model: str, conversation: str, results: Iterable[str], request: Attributes
    ) -> "CallSpan":
        """`results` = ids of tool calls whose results came with it: the tools ran until now."""
        now = time.time_ns()
        for call_id in results:
            if call_id in self._asked_tools:
                self._add_tool(call_id, *self._asked_tools.pop(call_id), now)
        model = _text(model)[:MOST_NAME]
        about: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.conversation.id": conversation,
            **request,
        }
        if model:
            about["gen_ai.request.model"] = model
        span = self._tracer.start_span(
            f"{operation} {model}".strip(),
            context=self._context,
            kind=self._api.SpanKind.CLIENT,
            attributes=_sendable(about),
            start_time=now,
        )
        return CallSpan(self, self._api, span)

    def _add_tool(self, call_id: str, name: str, began: int, ended: int) -> None:
        name = _text(name)[:MOST_NAME]
        about = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.id": call_id,
            "gen_ai.tool.type": "function",
        }
        span = self._tracer.start_span(
            f"execute_tool {name}", context=self._context, attributes=about, start_time=began
        )
        span.end(ended)

    def note_answer(self, input_tokens: int, output_tokens: int, tools: Iterable[tuple[str, str]]) -> None:
        now = time.time_ns()
        self._input_tokens += input_tokens
        self._output_tokens += output_tokens
        for call_id, name in tools:
            self._asked_tools[call_id] = name, now

    def end(self, outcome: Episode | Rejection) -> None:
        """The span itself ends with the block that it was made for."""
        if isinstance(outcome, Rejection):
            if outcome.reason is RejectReason.FILTERED:
                self._finish(outcome.reason.value)
            else:
                self.fail(outcome.reason.value, outcome.detail)
            return
        self._finish(ACCEPTED)
        reward = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": float(outcome.reward)}
        self._span.add_event("gen_ai.evaluation.result", reward)

    def fail(self, kind: str, detail: str) -> None:
        self._finish(kind)
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, _text(detail) or None))

    def _finish(self, outcome: str) -> None:
        self._span.set_attributes(
            {
                "areal.outcome": outcome,
                "gen_ai.usage.input_tokens": self._input_tokens,
                "gen_ai.usage.output_tokens": self._output_tokens,
            }
        )


class CallSpan:
    """One call of the model."""

    def __init__(self, episode: EpisodeTrace, api: Any, span: Any) -> None:
        self._episode = episode
        self._api = api
        self._span = span
        self._began = time.monotonic()
        self._ended = False

    def first_chunk(self) -> None:
        """Of an answer that comes in parts."""
        self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._began)

    def answered(
        self,
        input_tokens: int,
        output_tokens: int,
        finish_reasons: Sequence[str],
        versions: Iterable[int],
        tools: Iterable[tuple[str, str]] = (),
        more: Attributes | None = None,
    ) -> None:
        """`versions` = those of the weights that sampled it; `tools` = ids and names of the calls in it."""
        self._ended = True
        self._span.set_attributes(
            _sendable(
                {
                    "gen_ai.usage.input_tokens": input_tokens,
                    "gen_ai.usage.output_tokens": output_tokens,
                    "gen_ai.response.finish_reasons": list(finish_reasons),
                    "areal.weights.versions": sorted(set(versions)),
                    **(more or {}),
                }
            )
        )
        self._span.end()
        self._episode.note_answer(input_tokens, output_tokens, tools)

    def failed(self, kind: str, detail: str = "") -> None:
        """Nothing, if it was answered: whoever listened has stopped after the end."""
        if self._ended:
            return
        self._ended = True
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, _text(detail) or None))
        self._span.end()


def _sendable(attributes: Attributes) -> dict[str, Any]:
    return {
        name: _text(value)
        if isinstance(value, str)
        else [_text(each) if isinstance(each, str) else each for each in value]
        if isinstance(value, Sequence)
        else value
        for name, value in attributes.items()
    }


def _text(text: str) -> str:
    """What can be sent: half of a surrogate pair, which a model may write, would lose all spans of its batch."""
    return text.encode(errors="replace").decode()


def _service(environ: Mapping[str, str]) -> dict[str, str]:
    """What spans say they come from, unless the user named it: what is given to a resource wins over the variables."""
    named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {} if named else {"service.name": "areal"}
