"""vLLM as an engine: a server that this process starts with an interpreter of its own, or one that runs already.

vLLM guards generation with a key, but not the routes that pause it and change its weights. So it listens on a Unix
socket in a directory that only this user may enter, and whoever wants tokens comes to the process that holds this.

Weights are swapped in place while the answers in progress are kept; their tokens so far are computed again with the new
ones. An adapter is swapped the same way, under one name, which every request then asks for. vLLM labels what it draws
with a text: here the version and the digest of the weights. It tells the labels of an answer's tokens at the answer's
end; until then they are known from when each token arrived.
"""

import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.engine_api import WeightUpdate
from areal.api.errors import DrawnRefused, EngineError, EngineGone, RequestError
from areal.api.io_struct import ModelRequest
from areal.api.messages import Array
from areal.config.backend import VLLM_CHOICES
from areal.engine.inference.grammar import as_lark
from areal.engine.inference.http_engine import LOAD_SECONDS, UNSEEN, Drawn, HttpEngine, label_of, seed_of
from areal.engine.inference.http_server import HttpServer, ServerCommand, refusal
from areal.engine.inference.sequence import SequenceState
from areal.engine.model.adapter import CONFIG_NAME, published_config

START_SECONDS = 600.0
"""How long vLLM may take to start: half a minute for a small model, minutes on a busy machine or for a large one."""
TEMPERATURES = (0.01, 2.0)
"""What vLLM takes; it would silently use others in place of smaller ones."""
NEVER = -100.0
"""Added to a logit, it is as good as minus infinity; vLLM allows no less."""
TIED = 8
"""Further tokens as likely as the last that top_k left: vLLM draws from these too. An answer for which there were more
of them cannot be trained."""
MOST_LOGPROBS = VLLM_CHOICES + TIED
"""That are asked for at a token."""
FIRST = -1
"""The priority of a canary; other requests have 0, and go in the order in which they came."""
WHOLE_ANSWERS = 1 << 20
"""Tokens that are sent together when nobody wants to see them earlier; the first is sent at once."""
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
EXTENSION = Path(__file__).with_name("vllm_extension")
"""A directory from which vLLM's interpreter imports WORKER_MODULE."""
WORKER_MODULE = "areal_vllm_worker"
ADAPTER = "areal-adapter"
"""What vLLM calls the adapter that it is given."""

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and change weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # the route that brings an adapter
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # areal_vllm_worker.py knows the other one
}
LOCAL_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # one server is on one host
    "GLOO_SOCKET_IFNAME": "lo",
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "600",  # of a step; in the first it compiles its sampler, on a busy machine
}
"""For its CPU build; what the environment says goes before."""


class VllmEngine(HttpEngine):
    """Implements `InferenceEngine` on a vLLM server."""

    layouts = ("model", "adapter")
    _adapted = False
    """Requests ask for the adapter."""

    async def prepare(self) -> str:
        served = (await self.server.get("/v1/models"))["data"][0]
        self._limits = replace(self._limits, max_positions=served["max_model_len"])
        rule = "report log-probs of what it draws from"
        await self.ask_workers("report_drawn_distribution", rule, choices=MOST_LOGPROBS)
        if (await self.server.get("/is_paused"))["is_paused"]:
            self._paused = True
            self._draws.clear()
        else:
            await self._warm_up()
        label: str = (await self.server.get("/weight_info"))["weight_version"]
        return label

    async def label_server(self, label: str) -> None:
        await self.server.post("/update_weight_version", {"new_version": label})

    async def ask_workers(self, method: str, rule: str, **arguments: Any) -> None:
        """Call a method of `ArealWorker` in every worker process. Raises EngineError if one does not return True."""
        answer = await self.server.post("/collective_rpc", {"method": method, "kwargs": arguments}, LOAD_SECONDS)
        if set(answer["results"]) != {"True"}:
            raise EngineError(f"vLLM must {rule}, got {answer['results']}")

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

    def reports_sets(self, sequence: SequenceState) -> bool:
        return self._choices_of(sequence) <= VLLM_CHOICES

    def _choices_of(self, sequence: SequenceState) -> int:
        """Of how many tokens top_k leaves the choice, unless some are as likely as the last of them."""
        size = self._limits.vocab_size
        return min(sequence.gconfig.top_k or size, size)

    def _asked_logprobs(self, sequence: SequenceState) -> int:
        """Of how many of the likeliest tokens, beside the drawn one: if the last of them could not be drawn, all that
        could are among them."""
        if not sequence.limited or not self.reports_sets(sequence):
            return 0
        return min(self._choices_of(sequence) + TIED, self._limits.vocab_size)

    async def draw(self, sequence: SequenceState, req: ModelRequest, *, streamed: bool) -> AsyncGenerator[Drawn, None]:
        if req.grammar is not None:  # vLLM lets a grammar end with the tokenizer's end token only
            sequence.grammar_stops = sequence.stops & {self.tokenizer.eos_token_id}
        sampling = self._sampling(sequence, req, streamed)
        body = {"token_ids": sequence.ids, "stream": True, "sampling_params": sampling, **self._asked_model}
        async with aclosing(self.server.events("/inference/v1/generate", body)) as events:
            async for event in events:
                if "error" in event:
                    error = event["error"]
                    raise refusal("vLLM refuses a request", int(error["code"]), error["message"])
                yield self._drawn(event["choices"][0], sampling["logprobs"])

    async def pause_server(self) -> None:
        await self.server.post("/pause?mode=keep")

    async def resume_server(self) -> None:
        await self.server.post("/resume")

    async def score(self, tokens: Sequence[int]) -> list[float]:
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}  # so that its prefix cache is not read
        body = {"token_ids": tokens, "sampling_params": sampling, "priority": FIRST, **self._asked_model}
        entries = (await self.server.post("/inference/v1/generate", body))["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], tokens[1:], strict=True)]

    async def load_weights(self, update: WeightUpdate) -> None:
        if update.layout == "adapter":
            await self._load_adapter(update)
        else:
            load = {"method": "load_published_weights", "kwargs": {"weights_path": update.path}}
            await self.server.post("/collective_rpc", load, LOAD_SECONDS)
            self._adapted = False
        reset = await self.server.post("/reset_prefix_cache?reset_running_requests=true")
        if not reset["success"]:
            raise EngineError("vLLM keeps what it computed with the weights before")
        await self.label_server(label_of(update))

    async def _load_adapter(self, update: WeightUpdate) -> None:
        """vLLM learns its name by the route for adapters, and its matrices from its workers.

        The route can replace an adapter too (load_inplace). But that marks all requests that come after with the wish
        to do so: vLLM reads the adapter anew at each of their steps, and for older requests from an older directory.
        """
        config = Path(update.path) / CONFIG_NAME
        if not config.exists():  # on another host than the trainer's only the shards are fetched
            config.write_text(published_config(self._reader, update), encoding="utf-8")
        known = {each["id"] for each in (await self.server.get("/v1/models"))["data"]}
        if ADAPTER not in known:
            body = {"lora_name": ADAPTER, "lora_path": update.path}
            try:
                await self.server.post("/v1/load_lora_adapter", body, LOAD_SECONDS)
            except EngineGone:
                raise
            except EngineError as error:
                variables = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING={ENVIRONMENT['VLLM_ALLOW_RUNTIME_LORA_UPDATING']}"
                raise EngineError(
                    f"vLLM must take adapters: {error}; start it with --enable-lora, a --max-lora-rank of at least the "
                    f"adapter's, and {variables}"
                ) from None
        await self.ask_workers("load_published_adapter", "use the adapter", name=ADAPTER, path=update.path)
        self._adapted = True

    @property
    def _asked_model(self) -> dict[str, str]:
        """What of the server a request asks for; nothing = the model itself."""
        return {"model": ADAPTER} if self._adapted else {}

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
            "logprobs": self._asked_logprobs(sequence),  # 0 = of the drawn tokens only
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

    def _drawn(self, choice: dict[str, Any], asked: int) -> Drawn:
        entries = choice["logprobs"]["content"] if choice["token_ids"] else []
        logprobs = [entry["logprob"] for entry in entries]
        spans = choice["weight_versions"]
        versions = None
        if spans is not None:
            versions = [self.read_label(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        sets = [self._left(entry["top_logprobs"], asked) for entry in entries] if asked else None
        return Drawn(choice["token_ids"], logprobs, versions, sets, choice["finish_reason"])

    def _left(self, likeliest: list[dict[str, Any]], asked: int) -> Array:
        """The tokens that could be drawn, of the likeliest that were asked for; none if there may be more of them."""
        left = [each["token_id"] for each in likeliest if each["logprob"] > UNSEEN]
        whole = len(left) < asked or asked == self._limits.vocab_size
        return np.array(sorted(left) if whole else [], np.int32)

    async def _warm_up(self) -> None:
        """vLLM compiles parts of its sampler at the first request, which takes it up to a minute."""
        sampling = {"max_tokens": 1, "logprobs": 0, "detokenize": False, "top_k": 1, "seed": 0}
        body = {"token_ids": [0], "sampling_params": sampling, "priority": FIRST}  # refused where requests have none
        await self.server.post("/inference/v1/generate", body, LOAD_SECONDS)


def arguments_of(directory: Path, dtype: str, gpus: int) -> list[str]:
    """Those with which vLLM's server does what `VllmEngine` asks of it."""
    return [
        *("--model", str(directory), "--dtype", dtype, "--tensor-parallel-size", str(gpus)),
        *("--worker-extension-cls", f"{WORKER_MODULE}.ArealWorker", "--logprobs-mode", "processed_logprobs"),
        *("--max-logprobs", str(MOST_LOGPROBS)),
        *("--enable-scale-out", "--generation-config", "vllm", "--scheduling-policy", "priority"),
        *("--structured-outputs-config", '{"backend": "guidance"}', "--disable-uvicorn-access-log"),
    ]


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
        argv = [python or sys.executable, "-m", SERVER_MODULE, *arguments_of(directory, dtype, gpus)]
        argv += ["--uds", f"{place}/socket", *arguments]
        environ = {**CPU_ENVIRONMENT, **os.environ, **ENVIRONMENT, **LOCAL_ENVIRONMENT, "PYTHONPATH": str(EXTENSION)}
        command = ServerCommand("vLLM", argv, environ, f"unix:{place}/socket")
        return await VllmEngine.launch(command, directory, owned.pop_all(), timeout_seconds)


async def join_vllm(url: str, directory: Path, scratch: Path | None = None) -> VllmEngine:
    """On a vLLM server that runs already, of the model in `directory`. Raises EngineError if it cannot do what it must.

    `scratch`: where published weights are, or in the same file system; None = where temporary files are.
    """
    server = HttpServer(f"vLLM at {url}", url)
    try:
        await server.get("/health")
        engine = await VllmEngine.join(server, directory)
        await engine.resume()  # whoever used it before may have ended in the middle of a change of weights
        await _require_weights_visible(engine, scratch)
    except BaseException as error:
        await server.close()
        if isinstance(error, EngineError) and not isinstance(error, EngineGone):
            remedy = f"start it on the host of the run and as its user, with\n{by_hand(directory)}"
            raise EngineError(f"{error}; {remedy}") from None
        raise
    return engine


async def _require_weights_visible(engine: VllmEngine, scratch: Path | None) -> None:
    """It loads published weights from files that are here."""
    with tempfile.NamedTemporaryFile("w", prefix="areal-probe-", dir=scratch) as probe:
        probe.write(content := secrets.token_hex(16))
        probe.flush()
        rule = f"read the files of this host, in which new weights are, such as {probe.name}"
        await engine.ask_workers("can_read", rule, path=probe.name, content=content)


def by_hand(directory: Path, *, python: str = "python", address: Sequence[str] = ("--port", "8000")) -> str:
    """The shell command that starts a server for `rollout.addresses`."""
    variables = [f"{name}={value}" for name, value in {**ENVIRONMENT, "PYTHONPATH": str(EXTENSION)}.items()]
    words = [*variables, python, "-m", SERVER_MODULE, *arguments_of(directory, "float32", 1)]
    return shlex.join([*words, "--host", "127.0.0.1", *address])
