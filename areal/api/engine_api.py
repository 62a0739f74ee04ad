"""The protocols of an inference engine and a training engine. One conformance suite runs on every inference engine."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk

WeightLayout = Literal["model", "adapter"]


@dataclass(frozen=True)
class WeightShard:
    """One safetensors file of a version."""

    name: str
    size_bytes: int
    digest: str
    source: str = ""
    """The address at which hosts that lack it fetch it: of the rank that wrote it; empty = the driver's."""


@dataclass(frozen=True)
class Canary:
    """A short text and how likely its tokens are under a version's weights. An engine that cannot tell which weights it
    has is asked for the same, and must not be further off than arithmetic explains."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of every token but the first, as the trainer computes them."""
    tolerance: float
    """How far the median token may be off, in nats, as long as nothing is known of the engine's arithmetic."""
    earlier: dict[int, tuple[float, ...]]
    """The same under versions that a stale engine may have: the run's first and the one before."""


@dataclass(frozen=True)
class WeightUpdate:
    """New weights: safetensors files with Hugging Face's names, all in one directory, or each on the host of the rank
    that wrote it, in a directory of that name there."""

    version: int
    digest: str
    """Of all shards together."""
    path: str
    """The directory; empty for engines that hold no weights."""
    shards: tuple[WeightShard, ...] = ()
    layout: WeightLayout = "model"
    """model = every parameter; adapter = LoRA matrices on top of the whole model that the engine had last, which it was
    started with or which was published to it. The shard says which one that must be."""
    canary: Canary | None = None
    """None = every engine that gets these weights tells their digest."""


@dataclass(frozen=True)
class EngineHealth:
    """What an engine is doing, and with which weights."""

    version: int
    digest: str
    running: int
    """Requests being decoded."""
    waiting: int
    """Requests that have not begun."""
    paused: bool


@runtime_checkable
class InferenceEngine(Protocol):
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Complete a prompt. Cancelling the call aborts the generation."""
        ...

    def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        """The same, in chunks as tokens are sampled; the last holds the whole answer. Closing it aborts.

        `every_seconds`: the tokens of so many seconds may be gathered in one chunk, which costs the engine less.
        """
        ...

    async def stage_weights(self, update: WeightUpdate) -> None:
        """Fetch and verify weights, while generation goes on with the present ones, so that the swap is short."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Swap weights between two decode steps; running requests go on with the new ones. Stages them if needed."""
        ...

    async def pause(self) -> None:
        """Produce no tokens until `resume`; requests are kept."""
        ...

    async def resume(self) -> None: ...

    async def health(self) -> EngineHealth: ...

    async def aclose(self) -> None: ...


class TrainEngine(Protocol):
    """Holds the weights that are trained. `batch` and `loss` are those of `areal.engine.training.engine`."""

    version: int

    def logprobs(self, batch: Any) -> Any: ...

    def train_batch(self, batch: Any, loss: Any) -> dict[str, float]: ...

    def publish(self) -> WeightUpdate: ...

    def save(self, directory: str) -> None: ...
