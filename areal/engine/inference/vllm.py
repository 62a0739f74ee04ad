"""vLLM as an engine: a server that this process starts with an interpreter of its own, or one that runs already.

vLLM guards generation with a key, but not the routes that pause it and change its weights. So it listens on a Unix
socket in a directory that only this user may enter, and whoever wants tokens comes to the process that holds this.

Weights are swapped in place while the answers in progress are kept; their tokens so far are computed again with the new
ones. vLLM labels what it draws with a text: here the version and the digest of the weights. It tells the labels of an
answer's tokens at the answer's end; until then they are known from when each token arrived.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal.api.engine_api import WeightUpdate
from areal.api.errors import DrawnRefused, EngineError, RequestError
from areal.api.io_struct import ModelRequest
from areal.engine.inference.grammar import as_lark
from areal.engine.inference.http_engine import (
    LOAD_SECONDS,
    UNLABELLED,
    Drawn,
    HttpEngine,
    HttpServer,
    RequestLimits,
    ServerProcess,
    initial_weights,
    label_of,
    refusal,
    seed_of,
)
from areal.engine.inference.sequence import SequenceState
from areal.utils.hf_utils import load_hf_tokenizer

START_SECONDS = 600.0
"""How long vLLM may take to start: half a minute for a small model, minutes on a busy machine or for a large one."""
TEMPERATURES = (0.01, 2.0)
"""What vLLM takes; it would silently use others in place of smaller ones."""
NEVER = -100.0
"""Added to a logit, it is as good as minus infinity; vLLM allows no less."""
WHOLE_ANSWERS = 1 << 20
"""Tokens that are sent together when nobody wants to see them earlier; the first is sent at once."""
WORKER_MODULE = "areal_vllm_worker"
"""The name under which vLLM's interpreter imports vllm_worker.py."""

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and change weights
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # vllm_worker.py knows the other one
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # one server is on one host
    "GLOO_SOCKET_IFNAME": "lo",
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
"""For its CPU build; what the environment says goes before."""


class VllmEngine(HttpEngine):
    """Implements `InferenceEngine` on a vLLM server."""

    @classmethod
    async def connect(cls, server: HttpServer, directory: Path) -> "VllmEngine":
        """On a server of the model in `directory`, which knows `vllm_worker.py`."""
        served = (await server.get("/v1/models"))["data"][0]
        limits = replace(RequestLimits.of(directory), max_positions=served["max_model_len"])
        engine = cls(server, load_hf_tokenizer(directory), limits)
        answer = await server.post("/collective_rpc", {"method": "report_whole_distribution"}, LOAD_SECONDS)
        if set(answer["results"]) != {"True"}:
            raise EngineError(
                f"vLLM must report log-probs of the whole distribution, got {answer['results']}; start it with "
                "--worker-extension-cls ArealWorker of areal/engine/inference/vllm_worker.py"
            )
        label = (await server.get("/weight_info"))["weight_version"]
        if label == UNLABELLED:
            update = await asyncio.to_thread(initial_weights, directory)
            label = label_of(update)
            await server.post("/update_weight_version", {"new_version": label})
        engine.take_label(label)
        if (await server.get("/is_paused"))["is_paused"]:
            engine._paused = True
            engine._draws.clear()
            return engine
        await engine._warm_up()
        return engine

    def check(self, req: ModelRequest) -> None:
        g = req.gconfig
        low, high = TEMPERATURES
        if not g.is_greedy and not low <= g.temperature <= high:
            raise RequestError(
                f"vLLM takes temperatures in [{low:g}, {high:g}], got {g.temperature:g}; use one of these, or 0"
            )
        if req.grammar is None:
            return
        if g.min_new_tokens > 0:
            raise RequestError(
                f"{req.grammar.origin} cannot be combined with min_new_tokens on vLLM, got {g.min_new_tokens}; use 0"
            )
        if req.drawn is not None and req.drawn.tokens:
            raise DrawnRefused("vLLM holds an answer to a grammar only from its first token on")

    async def draw(self, sequence: SequenceState, req: ModelRequest, *, streamed: bool) -> AsyncGenerator[Drawn, None]:
        body = {"token_ids": sequence.ids, "stream": True, "sampling_params": self._sampling(sequence, req, streamed)}
        async with aclosing(self.server.events("/inference/v1/generate", body)) as events:
            async for event in events:
                if "error" in event:
                    error = event["error"]
                    raise refusal("vLLM refuses a request", int(error["code"]), error["message"])
                yield self._drawn(event["choices"][0])

    async def pause_server(self) -> None:
        await self.server.post("/pause?mode=keep")

    async def resume_server(self) -> None:
        await self.server.post("/resume")

    async def load_weights(self, update: WeightUpdate) -> None:
        load = {"method": "load_published_weights", "kwargs": {"weights_path": update.path}}
        await self.server.post("/collective_rpc", load, LOAD_SECONDS)
        reset = await self.server.post("/reset_prefix_cache?reset_running_requests=true")
        if not reset["success"]:
            raise EngineError("vLLM keeps what it computed with the weights before")
        await self.server.post("/update_weight_version", {"new_version": label_of(update)})

    def _sampling(self, sequence: SequenceState, req: ModelRequest, streamed: bool) -> dict[str, Any]:
        g, drawn = sequence.gconfig, sequence.drawn
        settings: dict[str, Any] = {
            "temperature": sequence.temperature,
            "top_p": g.top_p,
            "top_k": min(g.top_k, self._limits.vocab_size),
            "seed": seed_of(sequence),
            "max_tokens": g.max_new_tokens - drawn,
            "min_tokens": max(0, g.min_new_tokens - drawn),
            "stop_token_ids": sorted(sequence.stops),
            "ignore_eos": True,  # what ends an answer is in stop_token_ids
            "logprobs": 0,  # of the drawn tokens only
            "detokenize": False,
        }
        looked_at = streamed or g.stop or req.grammar is not None
        settings["stream_interval"] = 1 if looked_at else WHOLE_ANSWERS
        if req.grammar is not None:
            settings["structured_outputs"] = {"grammar": as_lark(req.grammar)}
            end = self.tokenizer.eos_token_id
            if end is not None and end not in sequence.stops:
                settings["logit_bias"] = {str(end): NEVER}  # vLLM's grammars allow it wherever the answer may end
        return settings

    def _drawn(self, choice: dict[str, Any]) -> Drawn:
        entries = choice["logprobs"]["content"] if choice["token_ids"] else []
        logprobs = [entry["logprob"] for entry in entries]
        spans = choice["weight_versions"]
        versions = None
        if spans is not None:
            versions = [self.read_label(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        return Drawn(choice["token_ids"], logprobs, versions, choice["finish_reason"])

    async def _warm_up(self) -> None:
        """vLLM compiles parts of its sampler at the first request, which takes it up to a minute."""
        sampling = {"max_tokens": 1, "logprobs": 0, "detokenize": False, "top_k": 1, "seed": 0}
        body = {"token_ids": [0], "sampling_params": sampling}
        await self.server.post("/inference/v1/generate", body, LOAD_SECONDS)


async def open_vllm(
    directory: Path,
    dtype: str = "float32",
    *,
    python: str = "",
    gpus: int = 1,
    arguments: Sequence[str] = (),
    scratch: Path | None = None,
    timeout_seconds: float = START_SECONDS,
) -> VllmEngine:
    """Start vLLM on a model directory. Raises EngineError if it does not serve in time.

    `python`: the interpreter that has vLLM; empty = this one. `gpus`: of this server, which share the model between
    them. `arguments`: further ones of vLLM's server. `scratch`: where its socket's directory is made; None = where
    temporary files are.
    """
    async with AsyncExitStack() as owned:
        private = tempfile.TemporaryDirectory(prefix="areal-vllm-", dir=scratch)  # made with mode 0700
        place = Path(owned.enter_context(private))
        shutil.copy(Path(__file__).with_name("vllm_worker.py"), place / f"{WORKER_MODULE}.py")
        argv = [
            *(python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(directory), "--dtype", dtype, "--uds", f"{place}/socket"),
            *("--tensor-parallel-size", str(gpus), "--enable-scale-out", "--generation-config", "vllm"),
            *("--logprobs-mode", "raw_logprobs", "--worker-extension-cls", f"{WORKER_MODULE}.ArealWorker"),
            *("--structured-outputs-config", '{"backend": "guidance"}', "--disable-uvicorn-access-log"),
            *arguments,
        ]
        environ = {**CPU_ENVIRONMENT, **os.environ, **ENVIRONMENT, "PYTHONPATH": str(place)}
        process = await ServerProcess.start("vLLM", argv, environ, owned.pop_all())
    server = await HttpServer.start("vLLM", f"unix:{place}/socket", process, timeout_seconds)
    try:
        return await VllmEngine.connect(server, directory)
    except BaseException:
        await server.close()
        raise
