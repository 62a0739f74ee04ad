"""The embedded engine, in one process with its client. `sharing: false` computes every prompt by itself."""

import asyncio
from pathlib import Path

import torch
from job import measure, read_job

from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.scheduler import Step, StepScheduler
from areal.engine.model.architecture import read_architecture
from areal.engine.model.decoder import Decoder
from areal.engine.model.weights import load_weights

MAX_RUNNING = 256


class Unshared(StepScheduler):
    """Admits one prompt per step, so that none is computed once for two requests."""

    def _add_prompts(self, step: Step, max_running: int) -> None:
        super()._add_prompts(step, min(max_running, len(self.running) + 1))


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    directory = Path(job["model"])
    decoder = Decoder(read_architecture(directory))
    load_weights(decoder, directory)
    runner = DecoderRunner(decoder, prefix_bytes=None if job["sharing"] else 0)
    with asyncio.Runner() as loop:
        engine = loop.run(opened(runner, job["sharing"]))

        async def answer(prompts: list[list[int]], new: int) -> int:
            asked = [
                ModelRequest(str(i), ids, GenerationHyperparameters(max_new_tokens=new, seed=i))
                for i, ids in enumerate(prompts)
            ]
            answers = await asyncio.gather(*map(engine.agenerate, asked))
            return sum(answer.output_len for answer in answers)

        measure(job, lambda prompts, new: loop.run(answer(prompts, new)))
        loop.run(engine.aclose())


async def opened(runner: DecoderRunner, sharing: bool) -> EmbeddedEngine:
    engine = EmbeddedEngine(runner, max_running=MAX_RUNNING)
    if not sharing:
        engine._scheduler = Unshared(engine._mixed, MAX_RUNNING)
    return engine


main()
