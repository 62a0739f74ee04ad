"""The engine of a workflow whose episode is traced: each of its calls has a span (`areal/infra/tracing.py`)."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.infra.tracing import CANCELLED, CallSpan, EpisodeTrace


class TracedEngine:
    def __init__(self, engine: InferenceEngine, trace: EpisodeTrace) -> None:
        self._engine = engine
        self._trace = trace

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        with self._span(req) as span:
            response = await self._engine.agenerate(req)
            _end(span, response)
        return response

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        with self._span(req) as span:
            began = False
            async with aclosing(self._engine.astream(req, every_seconds=every_seconds)) as chunks:
                async for chunk in chunks:
                    if span is not None and not began:
                        span.first_chunk()
                        began = True
                    if chunk.response is not None:
                        _end(span, chunk.response)
                    yield chunk

    @contextmanager
    def _span(self, req: ModelRequest) -> Iterator[CallSpan | None]:
        """None = the call comes from a session that this episode opened, where it has a span."""
        conversation = req.session or ""
        if conversation in self._trace.sessions:
            yield None
            return
        asked = {
            "gen_ai.request.max_tokens": req.gconfig.max_new_tokens,
            "gen_ai.request.temperature": req.gconfig.sampling_temperature,
        }
        span = self._trace.begin_call("text_completion", "", conversation, (), asked)
        try:
            yield span
        except (asyncio.CancelledError, GeneratorExit):
            span.failed(CANCELLED)
            raise
        except Exception as error:
            span.failed(type(error).__name__, str(error))
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _end(span: CallSpan | None, response: ModelResponse) -> None:
    if span is not None:
        span.answered(response.input_len, response.output_len, [response.stop_reason], response.output_versions)
