"""llama.cpp's server inside this process, with its prompt cache, on a float32 GGUF file."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp
from job import measure, read_job


def main() -> None:
    job = read_job()
    params = xllamacpp.CommonParams()
    params.model.path = job["gguf"]
    params.n_parallel = job["slots"]
    params.n_ctx = job["slots"] * job["context"]
    params.n_predict = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cont_batching = True
    params.warmup = True
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(job["slots"])

    def ask(ids: list[int], new: int) -> int:
        wanted = {
            "prompt": ids,
            "n_predict": new,
            "ignore_eos": True,
            "temperature": 1.0,
            "samplers": ["temperature"],
            "cache_prompt": True,
        }
        answer: Any = server.handle_completions(wanted)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        return int(answer["usage"]["completion_tokens"] if "usage" in answer else answer["tokens_predicted"])

    measure(job, lambda prompts, new: sum(pool.map(ask, prompts, [new] * len(prompts))))


main()
