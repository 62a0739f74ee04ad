"""Not SGLang: a stand-in that answers SGLang's routes as its source describes them, without a model.

Copied to `sglang/launch_server.py` in a directory of its own, it is what `python -m sglang.launch_server` starts. Its
tokens are a function of all tokens before and of the request's seed, so that an answer which goes on elsewhere is the
same. `AREAL_FAKE_SGLANG` makes it misbehave: "dies" ends it while it starts, "deaf" never answers, "cumulative" sends
all tokens of a call in every event. So do prompts of one of the tokens in `TROUBLE`.
"""

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
from typing import Any

from aiohttp import web

VOCABULARY = 261
TROUBLE = {250: (400, "it cannot be served"), 251: (500, "it went wrong"), 252: (500, "the scheduler died")}
"""Errors that a prompt of this token alone is answered with; after the last, the server is not healthy any more."""


class FakeSglang:
    def __init__(self, cumulative: bool) -> None:
        self.weight_version = "default"
        self.cumulative = cumulative
        self.healthy = True
        self.going = asyncio.Event()
        self.going.set()
        self.running: set[asyncio.Event] = set()
        """Set to break off a call."""
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "abort"
        self.going.clear()
        for broken_off in self.running:
            broken_off.set()
        await self.idle.wait()
        return web.json_response({"status": "ok"})

    async def go_on(self, _: web.Request) -> web.Response:
        self.going.set()
        return web.json_response({"status": "ok"})

    async def update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        loads = "model.safetensors" in os.listdir(body["model_path"])
        if loads:
            self.weight_version = body["weight_version"]
        message = "Succeeded" if loads else f"Failed to load {body['model_path']}"
        return web.json_response({"success": loads, "message": message}, status=200 if loads else 400)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        settings = body["sampling_params"]
        ids = list(body["input_ids"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if len(ids) == 1 and ids[0] in TROUBLE:
            code, message = TROUBLE[ids[0]]
            self.healthy = self.healthy and ids[0] != 252
            event = {"error": {"message": message, "type": "error", "code": code, "retryable": False}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")
            return response
        await self.going.wait()
        broken_off = asyncio.Event()
        self.running.add(broken_off)
        self.idle.clear()
        try:
            entries: list[list[Any]] = []
            finish: dict[str, Any] | None = None
            while finish is None:
                await asyncio.sleep(0.0005)  # as long as a fast model takes for a token
                new: list[list[Any]] = []
                if broken_off.is_set():
                    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                else:
                    token = self.token(ids, settings)
                    ids.append(token)
                    new = [[-0.5 - token / 1000, token, None]]
                    entries += new
                    finish = self.finish(token, len(entries), settings)
                meta = {
                    "finish_reason": finish,
                    "weight_version": self.weight_version,
                    "completion_tokens": len(entries),
                    "output_token_logprobs": entries if self.cumulative else new,
                }
                event = {"text": "", "output_ids": [token for _, token, _ in new], "meta_info": meta}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running.discard(broken_off)
            if not self.running:
                self.idle.set()
        return response

    @staticmethod
    def token(ids: list[int], settings: dict[str, Any]) -> int:
        seed = None if settings["temperature"] == 0 else settings["sampling_seed"]
        return int.from_bytes(hashlib.blake2b(repr((ids, seed)).encode(), digest_size=8).digest()) % VOCABULARY

    @staticmethod
    def finish(token: int, count: int, settings: dict[str, Any]) -> dict[str, Any] | None:
        if token in settings["stop_token_ids"]:
            return {"type": "stop", "matched": token}
        return {"type": "length", "length": count} if count >= settings["max_new_tokens"] else None


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--dtype", "--host", "--tp-size"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--incremental-streaming-output", action="store_true", required=True)
    given = parser.parse_args()
    mood = os.environ.get("AREAL_FAKE_SGLANG", "")
    if mood == "dies":
        raise SystemExit("CUDA out of memory, says this stand-in")
    if not mood:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # it too has processes that compute
    asyncio.run(serve(given.host, given.port, mood))


async def serve(host: str, port: int, mood: str) -> None:
    if mood == "deaf":
        print("this stand-in answers nobody", flush=True)
        await asyncio.Event().wait()
    fake = FakeSglang(cumulative=mood == "cumulative")
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", fake.health),
            web.get("/model_info", fake.model_info),
            web.post("/generate", fake.generate),
            web.post("/pause_generation", fake.pause),
            web.post("/continue_generation", fake.go_on),
            web.post("/update_weights_from_disk", fake.update_weights),
            web.post("/update_weight_version", fake.update_weight_version),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
