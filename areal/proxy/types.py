"""A call and its answer in no dialect's words: what dialects read requests into and write answers from."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from areal.proxy.errors import ApiError
from areal.trajectory.message import Message
from areal.trajectory.parsers.base import Reasoning, Text
from areal.trajectory.tree import Completion


@dataclass
class Call:
    messages: list[Message]
    """What the client sends: the whole conversation, or what is new after `continues`."""
    id_prefix: str = "chatcmpl-"
    """Of the ids that this dialect gives its answers."""
    model: str = ""
    """The name the client used; empty = the proxy's own."""
    instructions: str | None = None
    """A system message for this call only: a call that continues its answer does not inherit it."""
    continues: str | None = None
    """Id of the answer whose conversation goes on."""
    tools: list[dict[str, Any]] | None = None
    """Tools the model may call; None = it may call none."""
    tool_choice: Literal["auto", "required"] = "auto"
    """required = the answer is one or more tool calls."""
    forced_tool: str | None = None
    """The tool that must be called."""
    parallel_tool_calls: bool = True
    """False = the answer ends after its first tool call."""
    response_format: dict[str, Any] | None = None
    """{"type": "json_object"} or {"type": "json_schema", "schema", "strict"}: the answer is such JSON; None = any text.
    A schema that is not strict is followed as far as its keywords can be."""
    format_param: str = "response_format"
    """What the dialect calls the parameter above."""
    n: int = 1
    max_tokens: int | None = None
    """None = as many as the session and the context allow."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: list[str] | None = None
    seed: int | None = None
    logprobs: bool = False
    """Report the log-probability of every sampled token."""
    stream: bool = False
    stream_usage: bool = False
    """End a stream with the usage, if the dialect offers that choice."""
    echo: dict[str, Any] = field(default_factory=dict)
    """What the dialect repeats from the request in its answer."""
    size: int = 0
    """Bytes of the request's body."""


@dataclass
class Reply:
    id: str
    """Of the response; also of its first choice, so that a reward given to this id goes there."""
    created: int
    model: str
    prompt_tokens: int
    choices: list[Completion] = field(default_factory=list)
    """Empty at the beginning of a stream."""
    tokens: list[list[str]] = field(default_factory=list)
    """Text of each sampled token of each choice, if log-probabilities were asked for."""

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.output_ids) for choice in self.choices)


@dataclass(frozen=True)
class ToolCallEvent:
    """A whole tool call in a stream."""

    number: int
    id: str
    name: str
    arguments: str
    """JSON."""


Event = Reply | Text | Reasoning | ToolCallEvent
"""A stream is a Reply without choices, then the parts of the answer in order, then the Reply with its choice."""


class EventWriter(Protocol):
    """Writes one streamed answer as a dialect's events. `end` or `failure` comes once, last."""

    def begin(self, reply: Reply) -> bytes: ...

    def text(self, text: str) -> bytes: ...

    def reasoning(self, text: str) -> bytes: ...

    def tool_call(self, call: ToolCallEvent) -> bytes: ...

    def end(self, reply: Reply) -> bytes: ...

    def failure(self, failure: ApiError) -> bytes: ...
