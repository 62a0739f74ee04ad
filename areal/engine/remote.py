"""An engine in another process, spoken to over a channel."""

from typing import Any

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import EngineError
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.infra.channel import Channel, ChannelClosed, Handler

CONTROL_SECONDS = 60.0
"""How long a control call may take: it is served between two decode steps."""


class RemoteEngine:
    """Implements `InferenceEngine`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response: ModelResponse = await self._call("agenerate", req, timeout_seconds=None)
        return response

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._call("update_weights", update)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def health(self) -> EngineHealth:
        health: EngineHealth = await self._call("health")
        return health

    async def activity(self) -> list[tuple[float, float]]:
        return [(start, end) for start, end in await self._call("activity")]

    async def aclose(self) -> None:
        await self._channel.close()

    async def _call(self, method: str, *args: Any, timeout_seconds: float | None = CONTROL_SECONDS) -> Any:
        try:
            return await self._channel.call(method, *args, timeout_seconds=timeout_seconds)
        except ChannelClosed as error:
            raise EngineError(f"the engine is gone: {error}") from None


def engine_handlers(engine: Any) -> dict[str, Handler]:
    """The other end: what a process that holds `engine` answers."""
    verbs = ("agenerate", "update_weights", "pause", "resume", "health", "activity")
    return {verb: getattr(engine, verb) for verb in verbs if hasattr(engine, verb)}
