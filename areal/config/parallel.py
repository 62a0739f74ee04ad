"""How many ranks train the model, and how it is spread over them: `fsdp:d4`, `fsdp:d4t2`."""

import re
from dataclasses import dataclass
from typing import Self

from areal.config.errors import ConfigError, require

MOST_RANKS = 65_536
"""More is a typing error."""
_SPELLING = re.compile(r"fsdp:(?=[dt])(?:d(?P<data>[0-9]+))?(?:t(?P<tensor>[0-9]+))?")


@dataclass(frozen=True)
class Ranks:
    data: int
    """The `d`: shares that a batch is cut into; parameters, gradients and optimizer are sharded over them."""
    tensor: int
    """The `t`: ranks that compute each matrix product together."""

    @property
    def count(self) -> int:
        return self.data * self.tensor

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ConfigError that lists the choices."""
        found = _SPELLING.fullmatch(text)
        if found is None:
            raise ConfigError(
                "backend must be fsdp:dN, or fsdp:dNtM for N data-parallel groups of M tensor-parallel ranks each, "
                f"got {text!r}; e.g. fsdp:d4 or fsdp:d4t2, or leave it empty to train in the driver itself"
            )
        ranks = cls(int(found["data"] or 1), int(found["tensor"] or 1))
        require(ranks.data >= 1, f"backend must have d >= 1, got {text!r}; use d1 for one share")
        require(ranks.tensor >= 1, f"backend must have t >= 1, got {text!r}; leave t out")
        require(
            ranks.count <= MOST_RANKS,
            f"backend must have at most {MOST_RANKS:,} ranks, got {text!r}; each is a process with a device of its own",
        )
        return ranks
