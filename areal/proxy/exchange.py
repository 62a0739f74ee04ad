"""A request and its reply between a dialect and the engine, in no dialect's words."""

from dataclasses import dataclass, field
from typing import Any

from areal.trajectory.completion import Completion
from areal.trajectory.meaning import Message


@dataclass
class Call:
    messages: list[Message]
    model: str = ""
    """The name the client used; empty = the proxy's own."""
    tools: list[dict[str, Any]] | None = None
    """Tools the model may call; None = it may call none."""
    parallel_tool_calls: bool = True
    """False = the answer ends behind its first tool call."""
    n: int = 1
    max_tokens: int | None = None
    """None = what the session allows and the context leaves."""
    temperature: float | None = None
    top_p: float | None = None
    stop: list[str] | None = None
    seed: int | None = None
    logprobs: bool = False
    """Report the log-probability of every sampled token."""


@dataclass
class Reply:
    id: str
    """Of the response; names its first choice, so that a reward given to it goes there."""
    created: int
    model: str
    prompt_tokens: int
    choices: list[Completion]
    tokens: list[list[str]] = field(default_factory=list)
    """Text of each sampled token of each choice, where log-probabilities were asked for."""
