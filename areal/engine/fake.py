"""A deterministic engine without a model, for tests of everything around one. Needs no torch.

Its tokens are a function of the prompt and the request's seed, or what `script` says; it produces one token per request
and turn of the event loop, so pauses, weight swaps and cancellations fall between tokens as they do in a real engine.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import ContextLengthError, EngineError
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason

Script = Callable[[Sequence[int]], Sequence[int]]
"""Prompt ids -> the ids to answer with."""


class FakeEngine:
    """Implements `InferenceEngine`."""

    def __init__(self, *, vocab_size: int = 256, max_positions: int = 8192, script: Script | None = None) -> None:
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._script = script
        self._version = 0
        self._digests = {0: "fake-0"}
        self._going = asyncio.Event()
        self._going.set()
        self._running = 0
        self._closed = False

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        g = req.gconfig
        if len(req.input_ids) + g.max_new_tokens > self._max_positions:
            raise ContextLengthError(
                f"a prompt of {len(req.input_ids)} tokens and max_new_tokens={g.max_new_tokens} "
                f"exceed {self._max_positions} positions"
            )
        self._running += 1
        try:
            return await self._generate(req)
        finally:
            self._running -= 1

    async def update_weights(self, update: WeightUpdate) -> None:
        self._version = update.version
        self._digests[update.version] = update.digest

    async def pause(self) -> None:
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

    async def health(self) -> EngineHealth:
        return EngineHealth(
            version=self._version,
            digest=self._digests[self._version],
            running=self._running,
            waiting=0,
            paused=not self._going.is_set(),
        )

    async def aclose(self) -> None:
        self._closed = True
        self._going.set()

    async def _generate(self, req: ModelRequest) -> ModelResponse:
        tokens: list[int] = []
        versions: list[int] = []
        reason: StopReason = "length"
        scripted = list(self._script(req.input_ids)) if self._script else None
        while len(tokens) < req.gconfig.max_new_tokens:
            await asyncio.sleep(0)
            await self._going.wait()
            if self._closed:
                raise EngineError("the engine was closed")
            tokens.append(self._token(req, len(tokens), scripted))
            versions.append(self._version)
            stopping = tokens[-1] in req.gconfig.stop_token_ids
            if (stopping and len(tokens) > req.gconfig.min_new_tokens) or (scripted and len(tokens) == len(scripted)):
                reason = "stop"
                break
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=[self._logprob(req, place) for place in range(len(tokens))],
            output_versions=versions,
            stop_reason=reason,
            digests={version: self._digests[version] for version in set(versions)},
        )

    def _token(self, req: ModelRequest, place: int, scripted: list[int] | None) -> int:
        if scripted is not None:
            return scripted[place]
        token = self._hash(req, place) % self._vocab_size
        early = place < req.gconfig.min_new_tokens
        return (token + 1) % self._vocab_size if early and token in req.gconfig.stop_token_ids else token

    def _logprob(self, req: ModelRequest, place: int) -> float:
        return math.log((self._hash(req, place) % 1000 + 1) / 1001)

    def _hash(self, req: ModelRequest, place: int) -> int:
        key = repr((req.input_ids, req.gconfig.seed, req.gconfig.greedy, place)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())
