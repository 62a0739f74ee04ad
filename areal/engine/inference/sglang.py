"""SGLang as an engine: a server that this process starts with an interpreter of its own, or one that runs already.

Written from its documented routes and tested against a stand-in that answers as they do; SGLang itself was not run. It
has no Unix socket, so it listens on the loopback interface, where every user of that machine reaches it.

Before weights change, SGLang is told to break off all answers; each goes on afterwards from its tokens so far. So every
call of SGLang draws with one version.
"""

import os
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

from areal.api.engine_api import WeightUpdate
from areal.api.errors import RequestError
from areal.api.io_struct import ModelRequest
from areal.engine.inference.http_engine import LOAD_SECONDS, Drawn, HttpEngine, label_of, seed_of
from areal.engine.inference.http_server import HttpServer, ServerCommand, refusal
from areal.engine.inference.sequence import SequenceState

START_SECONDS = 600.0
"""How long SGLang may take to start."""
MAX_SEED = 2**63
"""Seeds are 64-bit integers with a sign."""


class SglangEngine(HttpEngine):
    """Implements `InferenceEngine` on an SGLang server."""

    async def prepare(self) -> str:
        label: str = (await self.server.get("/model_info"))["weight_version"]
        return label

    async def label_server(self, label: str) -> None:
        await self.server.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def check(self, req: ModelRequest) -> None:
        """Both would change the log-probs that SGLang reports: it masks logits before it computes them."""
        g = req.gconfig
        if req.grammar is not None:
            raise RequestError(f"{req.grammar.origin} cannot be honoured by SGLang; use another rollout.backend")
        if g.min_new_tokens > 0 and g.stop_token_ids:
            raise RequestError(
                f"SGLang takes min_new_tokens only without stop_token_ids, got {g.min_new_tokens}; use 0"
            )

    async def draw(self, sequence: SequenceState, req: ModelRequest, *, streamed: bool) -> AsyncGenerator[Drawn, None]:
        body = {
            "input_ids": sequence.ids,
            "sampling_params": self._sampling(sequence),
            "return_logprob": True,
            "stream": True,
        }
        seen = 0
        async with aclosing(self.server.events("/generate", body)) as events:
            async for event in events:
                if "error" in event:
                    error = event["error"]
                    raise refusal("SGLang refuses a request", int(error["code"]), error["message"])
                piece = _drawn(event["meta_info"], seen)
                seen += len(piece.tokens)
                piece.versions = [self.read_label(event["meta_info"]["weight_version"])] * seen
                yield piece

    async def pause_server(self) -> None:
        await self.server.post("/pause_generation", {"mode": "abort"})

    async def resume_server(self) -> None:
        await self.server.post("/continue_generation", {})

    async def score(self, tokens: Sequence[int]) -> list[float]:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,  # so that its prefix cache is not read
        }
        entries = (await self.server.post("/generate", body))["meta_info"]["input_token_logprobs"]
        return [logprob for logprob, *_ in entries[1:]]

    async def load_weights(self, update: WeightUpdate) -> None:
        load = {"model_path": update.path, "weight_version": label_of(update), "flush_cache": True}
        await self.server.post("/update_weights_from_disk", load, LOAD_SECONDS)

    def _sampling(self, sequence: SequenceState) -> dict[str, Any]:
        g = sequence.gconfig
        return {
            "temperature": sequence.temperature,
            "top_p": g.top_p,
            "top_k": g.top_k or -1,
            "sampling_seed": seed_of(sequence) % MAX_SEED,
            "max_new_tokens": g.max_new_tokens - sequence.drawn,
            "stop_token_ids": sorted(sequence.stops),
            "ignore_eos": True,  # what ends an answer is in stop_token_ids
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }


def _drawn(meta: dict[str, Any], seen: int) -> Drawn:
    """What was drawn after the first `seen` tokens of a call. Its log-probs are a list of the new tokens, or of all."""
    count = meta.get("completion_tokens", seen) - seen  # a call that was broken off before it began has none
    entries = meta["output_token_logprobs"][-count:] if count else []
    finish = meta["finish_reason"]
    if finish is not None and finish.get("status_code") is not None:
        raise refusal("SGLang refuses a request", finish["status_code"], finish["message"])
    return Drawn(
        tokens=[token for _, token, *_ in entries],
        logprobs=[logprob for logprob, *_ in entries],
        finish=None if finish is None else finish["type"],
    )


async def open_sglang(
    directory: Path,
    dtype: str = "float32",
    *,
    python: str = "",
    gpus: int = 1,
    arguments: Sequence[str] = (),
    timeout_seconds: float = START_SECONDS,
) -> SglangEngine:
    """Start SGLang on a model directory. Raises EngineError if it does not serve in time.

    `python`: the interpreter that has SGLang; empty = this one. `gpus`: of this server, which share the model between
    them. `arguments`: further ones of SGLang's server.
    """
    port = _free_port()
    argv = [
        *(python or sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(directory), "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)),
        *("--tp-size", str(gpus), "--incremental-streaming-output"),
        *arguments,
    ]
    command = ServerCommand("SGLang", argv, os.environ, f"http://127.0.0.1:{port}")
    return await SglangEngine.launch(command, directory, AsyncExitStack(), timeout_seconds)


async def join_sglang(url: str, directory: Path) -> SglangEngine:
    """On an SGLang server that runs already, of the model in `directory`, which sees the files of this host."""
    engine = await SglangEngine.join(HttpServer(f"SGLang at {url}", url), directory)
    await engine.resume_server()  # whoever used it before may have ended in the middle of a change of weights
    return engine


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
