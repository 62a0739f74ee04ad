"""A call and its answer in no dialect's words: what dialects read requests into and write answers from."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from areal.api.io_struct import Steering
from areal.proxy.errors import ApiError
from areal.trajectory.message import Message
from areal.trajectory.parsers.base import Reasoning, Text
from areal.trajectory.tree import Completion


@dataclass
class Call:
    messages: list[Message]
    """What the client sends: the whole conversation, or what is new after `continues`."""
    raw_prompt: str | list[int] | None = None
    """What the answer follows, as it is, without a chat template; None = the messages."""
    prefill: str = ""
    """How the answer begins; the model goes on from there, and only what it adds is the client's answer."""
    truncates: bool = False
    """The oldest messages of a conversation that is too long are left out."""
    thinks: bool | None = None
    """Whether a model that can do both is to think first; None = as its template does."""
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
    custom_tools: frozenset[str] = frozenset()
    """Names of those that the client wants called with a plain text, which is their one argument, `input`."""
    legacy_functions: bool = False
    """The client speaks of functions, as before there were tools: one call, without an id."""
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
    top_logprobs: int = 0
    """And those of this many of the likeliest tokens in its place."""
    steering: Steering | None = None
    """What is added to the model's logits; only where nothing is trained."""
    stream: bool = False
    stream_usage: bool = False
    """End a stream with the usage, if the dialect offers that choice."""
    stores: bool = False
    """The answer can be asked for again by its id, if the dialect offers that."""
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
    tokens: list[list["SampledToken"]] = field(default_factory=list)
    """Of each choice, without its end token, if log-probabilities were asked for."""
    beginning: str = ""
    """What the client wrote of each answer, which it does not get back."""
    completed: int = field(default_factory=lambda: int(time.time()))
    """When the answer was whole."""

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


class TokenChance(NamedTuple):
    """A token, and how likely it was in its place."""

    text: str
    raw: bytes
    """What it adds to the answer; part of a character has no text of its own."""
    logprob: float


class SampledToken(NamedTuple):
    """What a client is told of a token that was drawn."""

    chance: TokenChance
    alternatives: list[TokenChance]
    """The likeliest first."""
    of_text: bool
    """It is part of what the answer says: not of its thinking, nor of a call."""


@dataclass(frozen=True)
class Tokens:
    """The tokens that the next part of a stream is made of, if log-probabilities were asked for."""

    tokens: list[SampledToken]


@dataclass(frozen=True)
class Choice:
    """What follows in a stream is of this choice; a stream begins with the first one's."""

    number: int


Event = Reply | Text | Reasoning | ToolCallEvent | Tokens | Choice
"""A stream is a Reply without choices, then the parts of the answers in order, then the Reply with its choices."""


class EventWriter(Protocol):
    """Writes one streamed answer as a dialect's events. `end` or `failure` comes once, last."""

    def begin(self, reply: Reply) -> bytes: ...

    def text(self, text: str) -> bytes: ...

    def reasoning(self, text: str) -> bytes: ...

    def tool_call(self, call: ToolCallEvent) -> bytes: ...

    def tokens(self, tokens: list[SampledToken]) -> bytes: ...

    def choice(self, number: int) -> bytes: ...

    def end(self, reply: Reply) -> bytes: ...

    def failure(self, failure: ApiError) -> bytes: ...
