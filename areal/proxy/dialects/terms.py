"""What every dialect holds to: a parameter is honoured, harmless, or refused by name; none is ignored in silence."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from areal.proxy.errors import bad_request
from areal.trajectory.pictures import Album
from areal.utils.logging import getLogger

HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Bookkeeping of the hosted services; no answer depends on it."""


@dataclass(frozen=True)
class Terms:
    max_choices: int = 128
    """Largest `n` of one request."""
    drop_params: bool = False
    """Go on without what cannot be honoured, with a line in the log the first time, instead of refusing."""
    album: Album | None = None
    """Where pictures are kept; None = the model sees none."""
    dropped: set[str] = field(default_factory=set)
    """What the log has named already."""

    def refuse(self, name: str, value: Any, rule: str) -> None:
        """Raises ApiError 400 naming the parameter; returns where it is to be dropped."""
        if not self.drop_params:
            raise bad_request(f"{name} {rule}, got {value!r:.200}; leave it out", name)
        if name not in self.dropped:
            self.dropped.add(name)
            getLogger("proxy").warning("%s %s; it is dropped because of proxy.drop_params", name, rule)

    def refuse_unsupported(
        self, body: dict[str, Any], honoured: Collection[str], meaningless: Mapping[str, tuple[Any, ...]]
    ) -> None:
        """`meaningless` are values by which parameters that are not honoured ask for nothing."""
        for name, value in body.items():
            if value is None or name in honoured or name in HARMLESS or value in meaningless.get(name, ()):
                continue
            self.refuse(name, value, "is not supported")
