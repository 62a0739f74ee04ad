"""The wires that agents speak, one file each, with the same verbs; helpers are named after the dialect they help."""

from typing import Any, Protocol

from areal.proxy.dialects.base import ParameterRules
from areal.proxy.errors import ApiError
from areal.proxy.types import Call, EventWriter, Reply


class Dialect(Protocol):
    """What each of the modules chat, responses and messages has."""

    def parse(self, body: dict[str, Any], terms: ParameterRules) -> Call:
        """Read a request. Raises ApiError 400 naming the parameter."""
        ...

    def render(self, call: Call, reply: Reply) -> dict[str, Any]:
        """Write a whole reply."""
        ...

    def writer(self, call: Call) -> EventWriter:
        """Write a streamed one."""
        ...

    def error(self, failure: ApiError) -> dict[str, Any]: ...
