"""Which engine serves a run, and how many of them: `embedded`, `embedded:d2`, `vllm:d2t4`, `sglang:d4`."""

import re
from dataclasses import dataclass
from typing import Self

from areal.config.errors import ConfigError, require

KINDS = ("embedded", "vllm", "sglang")
SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
"""Programs of others, by the package that has them."""
SERVER_REMEDY = (
    "install it into an environment of its own and set rollout.python=PATH/bin/python, or rollout.backend=embedded"
)
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM may be started for."""
VLLM_CHOICES = 1024
"""With a top_k up to this vLLM is asked what top_k and top_p left to draw from: it lists them at every token."""
_SPELLING = re.compile(r"(?P<kind>[a-z]+)(?::(?=[dt])(?:d(?P<servers>[0-9]+))?(?:t(?P<gpus>[0-9]+))?)?")


@dataclass(frozen=True)
class Backend:
    kind: str
    """One of `KINDS`."""
    servers: int = 1
    """The `d`: servers, each with the whole model."""
    gpus_each: int = 1
    """The `t`: GPUs that one server spreads the model over."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ConfigError that lists the choices."""
        found = _SPELLING.fullmatch(text)
        if found is None or found["kind"] not in KINDS:
            raise ConfigError(
                f"backend must be one of {', '.join(KINDS)}, or one of them with :dNtM for N servers of M GPUs each, "
                f"got {text!r}; e.g. embedded, embedded:d2 or vllm:d2t4"
            )
        backend = cls(found["kind"], int(found["servers"] or 1), int(found["gpus"] or 1))
        require(backend.servers >= 1, f"backend must have d >= 1 servers, got {text!r}; use d1 for one")
        require(backend.gpus_each >= 1, f"backend must have t >= 1 GPUs for each server, got {text!r}; leave t out")
        require(
            backend.kind != "embedded" or backend.gpus_each == 1,
            f"the embedded engine computes on one device, got backend={text!r}; use d{backend.servers} alone, "
            "or vllm for models that need several GPUs",
        )
        return backend
