"""Not SGLang: a stand-in that answers its routes with a real model, which transformers computes, on this event loop.

It can be made to lose weights without an error: of new ones, it takes the tensors that `takes` names. Its answers are
one token long; what is asked of it is how likely prompts are.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class ScoringServer:
    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self.takes: Callable[[str], bool] = lambda name: True
        """Whether it takes a tensor of new weights, by its name in their file."""
        self.scored: list[str] = []
        """What it called its weights whenever it was asked how likely a prompt is."""
        self.url = ""
        self._label = "default"
        self._directory = model
        self._dtype = dtype
        self.restart()

    def restart(self) -> None:
        """It has the weights of its files again."""
        self._label = "default"
        self._model: Any = AutoModelForCausalLM.from_pretrained(self._directory, dtype=self._dtype)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._label})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self._label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def pause(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        own = self._model.state_dict()
        for name, tensor in load_file(f"{body['model_path']}/model.safetensors").items():
            if self.takes(name):
                own[name].copy_(tensor)
        self._label = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded"})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = torch.tensor([body["input_ids"]])
        with torch.no_grad():
            logprobs_l_v = self._model(ids).logits[0].float().log_softmax(-1)
        token = int(logprobs_l_v[-1].argmax())
        meta = {
            "finish_reason": {"type": "length", "length": 1},
            "weight_version": self._label,
            "completion_tokens": 1,
            "output_token_logprobs": [[float(logprobs_l_v[-1, token]), token, None]],
        }
        if body.get("logprob_start_len") == 0:
            self.scored.append(self._label)
            known = logprobs_l_v[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
            entries = zip([None, *known], ids[0].tolist(), strict=True)
            meta["input_token_logprobs"] = [[logprob, each, None] for logprob, each in entries]
        event = web.json_response({"text": "", "output_ids": [token], "meta_info": meta})
        if body.get("stream"):
            assert isinstance(event.text, str)
            return web.Response(text=f"data: {event.text}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
        return event


@asynccontextmanager
async def scoring_server(model: Path, dtype: torch.dtype = torch.float32) -> AsyncIterator[ScoringServer]:
    server = ScoringServer(model, dtype)
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", server.health),
            web.get("/model_info", server.model_info),
            web.post("/generate", server.generate),
            web.post("/pause_generation", server.pause),
            web.post("/continue_generation", server.pause),
            web.post("/update_weights_from_disk", server.update_weights),
            web.post("/update_weight_version", server.update_weight_version),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()
