"""The proxy on an engine that takes no time, as a process: `python -m benchmarks.instant SESSIONS`.

It prints one JSON line with the base URLs and keys of its sessions, answers every line of its input with `{"cpu": …,
"rss": …}`, and exits at the end of its input. With `--upstream` it is instead a bare OpenAI-compatible server with a
constant answer, for another proxy to forward to.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk

ANSWER = "1259"


class InstantEngine:
    """Answers every prompt at once, with the same few tokens."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        count = len(self._answer)
        return ModelResponse(req.input_ids, list(self._answer), [-0.1] * count, [0] * count, "stop", {0: "instant"})

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        answer = await self.agenerate(req)
        yield TokenChunk(answer.output_tokens, answer.output_logprobs, answer.output_versions, answer)

    async def stage_weights(self, update: WeightUpdate) -> None: ...
    async def update_weights(self, update: WeightUpdate) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def aclose(self) -> None: ...

    async def health(self) -> EngineHealth:
        return EngineHealth(0, "instant", 0, 0, False)


async def instant_proxy() -> Any:
    from areal.config.rollout import GenerationHyperparameters
    from areal.engine.models import find_model
    from areal.proxy import Proxy, ProxyLimits
    from areal.utils.hf_utils import load_hf_tokenizer

    tokenizer = load_hf_tokenizer(find_model("builtin:tiny-math"))
    engine = InstantEngine([*tokenizer(ANSWER)["input_ids"], tokenizer.eos_token_id])
    gconfig = GenerationHyperparameters(max_new_tokens=16)
    limits = ProxyLimits(max_sessions=20_000)
    proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=8192, limits=limits)
    await proxy.start()
    return proxy


def upstream_app() -> Any:
    """Answers every request with the same chat completion, in raw ASGI."""
    body = json.dumps(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": "instant",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ANSWER}}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        }
    ).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


async def serve(sessions: int) -> None:
    proxy = await instant_proxy()
    opened = [proxy.open_session() for _ in range(sessions)]
    gc.collect()
    gc.freeze()  # as a rollout worker does
    print(json.dumps({"sessions": [(session.base_url, session.api_key) for session in opened]}), flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps({"cpu": time.process_time(), "rss": resident_bytes()}), flush=True)
    await proxy.aclose()


def serve_upstream() -> None:
    import socket

    import uvicorn

    bound = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"port": bound.getsockname()[1]}), flush=True)
    server = uvicorn.Server(uvicorn.Config(upstream_app(), log_level="error", lifespan="off"))
    asyncio.run(server.serve(sockets=[bound]))


if __name__ == "__main__":
    if sys.argv[1] == "--upstream":
        serve_upstream()
    else:
        asyncio.run(serve(int(sys.argv[1])))
