"""A fake engine that tells when requests are in it, the task that episodes get, and one call of the real SDK."""

import asyncio
from typing import Any

import openai.resources.chat.completions  # noqa: F401  (the SDK loads it with the first call, which a deadline may hit)
from openai import AsyncOpenAI

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.engine.inference.fake import FakeEngine

MAX_POSITIONS = 1024
DATA: dict[str, Any] = {"messages": [{"role": "user", "content": "Sort 5291"}], "answer": "1259"}


class WatchedEngine(FakeEngine):
    """Tells when requests are in it, and keeps them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.requests: list[ModelRequest] = []
        self._inside = 0
        self._changed = asyncio.Event()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        self._count(1)
        try:
            return await super().agenerate(req)
        finally:
            self._count(-1)

    async def until_inside(self, count: int) -> None:
        async with asyncio.timeout(20):
            while self._inside != count:
                self._changed.clear()
                await self._changed.wait()

    async def load(self) -> int:
        health = await self.health()
        return health.running + health.waiting

    def _count(self, change: int) -> None:
        self._inside += change
        self._changed.set()


async def chat(context: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """One call of the SDK, with what was injected into an agent (a dict) or what it finds in its context."""
    keys = ("base_url", "api_key", "http_client")
    found = context if isinstance(context, dict) else {key: getattr(context, key) for key in keys}
    async with AsyncOpenAI(max_retries=0, **{key: found[key] for key in keys if key in found}) as client:
        return await client.chat.completions.create(model="any", messages=messages, **options)
