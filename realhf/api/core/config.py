"""Which agent and which environment an experiment uses: a registered name and constructor arguments."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Abstraction:
    type_: str
    """The name it is registered under."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its constructor's arguments; `gconfig` and `tokenizer` that these leave out come from the config."""


class AgentAbstraction(Abstraction):
    """An agent by name."""


class EnvServiceAbstraction(Abstraction):
    """An environment by name."""
