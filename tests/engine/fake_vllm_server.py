"""Not vLLM: a stand-in that answers its routes as vLLM 0.32 does, without a model."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

UNLIKELY = -9999.0
"""What vLLM reports for the log-prob of a token that could not be drawn."""


class FakeVllm:
    """Answers as vLLM does, and keeps what it was asked."""

    def __init__(self, *, takes_adapters: bool = True) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.models = ["the model"]
        self.label = "default"
        self.choices: list[dict[str, float]] = [{"7": -0.5}]
        """What an answer is drawn from: for each of its tokens, those that could be drawn, the drawn one first."""
        self._takes_adapters = takes_adapters

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.json()
        self.asked.append((path, body))
        if path == "/v1/load_lora_adapter":
            if not self._takes_adapters:
                return web.json_response({"detail": "Not Found"}, status=404)
            self.models.append(body["lora_name"])
            return web.Response(text="Success")
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/inference/v1/generate" and body.get("stream"):
            return await self._stream(request, body["sampling_params"]["logprobs"])
        return web.json_response(
            {
                "/v1/models": {"data": [{"id": each, "max_model_len": 512} for each in self.models]},
                "/collective_rpc": {"results": ["True"]},
                "/is_paused": {"is_paused": False},
                "/weight_info": {"weight_version": self.label},
                "/reset_prefix_cache": {"success": True},
            }.get(path, {})
        )

    async def _stream(self, request: web.Request, asked: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        choice = {
            "token_ids": [int(next(iter(each))) for each in self.choices],
            "logprobs": {"content": [_content(each, asked) for each in self.choices]},
            "weight_versions": [{"version": self.label, "start": 0, "end": len(self.choices)}],
            "finish_reason": "length",
        }
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        return response

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]


def _content(choices: dict[str, float], asked: int) -> dict[str, Any]:
    """The drawn token and the likeliest: those that could be drawn, and then others."""
    others = (str(token) for token in range(100, 100 + asked) if str(token) not in choices)
    ranked = [*sorted(choices.items(), key=lambda each: -each[1]), *((token, UNLIKELY) for token in others)]
    drawn = next(iter(choices.items()))
    listed = dict([drawn, *ranked[:asked]])
    top = [{"token_id": int(token), "logprob": logprob} for token, logprob in [*listed.items()][: max(asked, 1)]]
    return {"logprob": drawn[1], "top_logprobs": top}


@pytest.fixture
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[tuple[FakeVllm, str]]:
    fake = FakeVllm(takes_adapters=getattr(request, "param", True))
    runner = web.AppRunner(fake.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield fake, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
