"""Whole rounds of generating, training and publishing on the simulated device: `python simulated_round.py`.

What they compute is checked by a trainer on the CPU. The figures of each model are printed as JSON, by name.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simulated_device
import torch
from drawn_rows import reader_of
from simulated_device import crossings
from tiny_adapters import low_rank, merge_by_hand
from tiny_models import write_model
from transformers_models import batch, requests, sampled, write_gpt2, write_llava

from areal.api.io_struct import Grammar, ModelRequest, ModelResponse
from areal.api.messages import Episode, GroupResult, Row
from areal.config.rollout import GenerationHyperparameters
from areal.config.training import ActorConfig, OptimizerConfig
from areal.engine import models
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.model.adapter import AdapterConfig, adapter_writer
from areal.engine.training.choices import ChoiceReader
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.figures import Figures
from areal.trainer.update import PolicyUpdate
from areal.utils.hf_utils import load_hf_tokenizer

MODELS: dict[str, Callable[[Path], Path]] = {
    "builtin": lambda directory: models.find_model("builtin:tiny-math"),
    "llama": lambda directory: write_model(directory, family="llama", num_kv_heads=4, tied_embeddings=False),
    "gpt2": write_gpt2,
    "vision": write_llava,
}


def open_engine(model: Path, dtype: str = "float32") -> EmbeddedEngine:
    runner = models.open_runner(model, dtype, device="sim")
    if isinstance(runner, DecoderRunner):
        runner.chunk_tokens = 48  # so that long prompts are computed in pieces
    return EmbeddedEngine(runner, load_hf_tokenizer(model), max_running=7)


def open_trainer(model: Path, device: str, dtype: str = "float32", **options: Any) -> TrainingEngine:
    trainable = models.open_trainable(model, device=device, **options)
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0)
    return TrainingEngine(trainable, optimizer, total_steps=10, max_tokens_per_mb=256, dtype=dtype)


def asked_of(model: Path, with_images: bool) -> list[ModelRequest]:
    """Requests of every kind: temperatures, limits, greedy, banned tokens, a grammar, a group on a long prompt."""
    asked = requests(model, 9, with_images=with_images)
    draw = np.random.default_rng(1)

    def ask(count: int, **settings: Any) -> ModelRequest:
        settings = {"max_new_tokens": 9, "seed": len(asked)} | settings
        return ModelRequest(
            str(len(asked)), draw.integers(10, 250, count).tolist(), GenerationHyperparameters(**settings)
        )

    asked += [ask(5, top_p=0.7), ask(7, top_k=3, temperature=0.8), ask(3, greedy=True)]
    asked += [ask(4, stop_token_ids=[*range(3, 200)], min_new_tokens=4)]
    asked += [ask(6, max_new_tokens=40)]
    asked[-1].grammar = Grammar("lark", "start: /[ab]{2,5}/")
    prompt = ask(150).input_ids
    return asked + [
        ModelRequest(f"group {i}", prompt, GenerationHyperparameters(max_new_tokens=8 + 4 * i, seed=i))
        for i in range(6)
    ]


def loss(logprobs: torch.Tensor, fields: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Figures]:
    value = -(logprobs * fields["weights"]).sum()
    return value, Figures(mean={"mean": logprobs.mean()}, maximum={"largest": fields["weights"].max()})


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


async def generate(engine: EmbeddedEngine, asked: Sequence[ModelRequest]) -> list[ModelResponse]:
    return await asyncio.gather(*map(engine.agenerate, asked))


async def crossings_per_token(engine: EmbeddedEngine) -> dict[str, float]:
    """Of a single request."""
    counts = []
    for tokens in (4, 20):
        crossings.clear()
        await generate(engine, [ModelRequest("one", [7, 8], GenerationHyperparameters(max_new_tokens=tokens, seed=1))])
        counts.append(dict(crossings))
    return {name: (counts[1][name] - counts[0][name]) / 16 for name in counts[1]}


async def swap_meanwhile(engine: EmbeddedEngine, asked: Sequence[ModelRequest], update: Any) -> list[int]:
    """Swap weights while requests are running; the versions of their tokens."""
    running = asyncio.ensure_future(generate(engine, asked))
    long = ModelRequest("long", [9, 8, 7], GenerationHyperparameters(max_new_tokens=60, seed=3))
    versions: set[int] = set()
    async for chunk in engine.astream(long):
        versions |= set(chunk.versions)
        if len(versions) == 1 and 1 not in versions:
            await engine.update_weights(update)
    await running
    return sorted(versions)


async def round_of(model: Path, with_images: bool) -> dict[str, Any]:
    engine, trainer, judge = open_engine(model), open_trainer(model, "sim"), open_trainer(model, "cpu")
    figures: dict[str, Any] = {
        "device": str(trainer.flat.device),
        "crossings_per_token": await crossings_per_token(engine),
    }
    asked = asked_of(model, with_images)
    answers = await generate(engine, asked)
    reader = reader_of(model)
    trained = batch(asked, answers, reader)
    trained.fields["weights"] = torch.linspace(0, 0.01, len(trained.temperatures))
    figures["sampled"] = largest(sampled(answers), judge.logprobs(trained))
    figures["recomputed"] = largest(trainer.logprobs(trained), judge.logprobs(trained))
    crossings.clear()
    scores = torch.empty(len(trained.temperatures))
    figures["step"] = dict(trainer.train_batch(trained, loss, scores=scores))
    figures["passes"] = len(list(trainer.model.passes(trained.spans, trainer.max_tokens_per_mb)))
    figures["to_the_host_per_step"] = crossings["to the host"]
    figures["trained"] = largest(scores, judge.logprobs(trained))
    figures["step_on_cpu"] = dict(judge.train_batch(trained, loss))

    trainer.version = 1
    figures["versions"] = await swap_meanwhile(engine, asked, trainer.publish())
    again = await generate(engine, asked)
    with tempfile.TemporaryDirectory() as name:
        trainer.save(name)
        load_hf_tokenizer(model).save_pretrained(name)
        figures["published"] = largest(
            sampled(again), open_trainer(Path(name), "cpu").logprobs(batch(asked, again, reader))
        )
        if any("q_proj" in weight for weight, _ in judge.model.named_weights()):  # not in GPT-2
            figures["adapter"] = await adapter_difference(engine, asked, open_trainer(Path(name), "cpu"), reader)
    figures["resumed"] = resume(model, trainer, trained)
    figures["update"], figures["update_on_cpu"] = policy_updates(model, asked, answers)
    figures["bfloat16"] = in_bfloat16(model, trained, judge)
    trainer.close()
    await engine.aclose()
    return figures


async def adapter_difference(
    engine: EmbeddedEngine, asked: Sequence[ModelRequest], judge: TrainingEngine, reader: ChoiceReader
) -> float:
    """Of log-probs under an adapter to the judge's model, which was published to the engine before."""
    config = AdapterConfig(r=2, lora_alpha=3, target_modules=("q_proj", "v_proj"))
    layers = low_rank(judge, config, seed=1)
    with tempfile.TemporaryDirectory() as place:
        writer = adapter_writer(Path(place), config, layers, judge.model.named_weights())
        await engine.update_weights(writer.write(2))
    merge_by_hand(judge, config, layers)
    answers = await generate(engine, asked)
    return largest(sampled(answers), judge.logprobs(batch(asked, answers, reader)))


def policy_updates(model: Path, asked: Sequence[ModelRequest], answers: Sequence[ModelResponse]) -> list[Any]:
    """The update that a run makes, with a reference and recomputed log-probs: there, and on the CPU."""
    episodes = []
    for number, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        ids = np.array(answer.input_tokens + answer.output_tokens, dtype=np.int32)
        mask = np.arange(len(ids)) >= answer.input_len
        logprobs = np.where(mask, 0, np.float32(0))
        logprobs[mask] = answer.output_logprobs
        temperatures = np.where(mask, request.gconfig.temperature, 1).astype(np.float32)
        reward = float(number % 2)
        returns = np.where(mask, reward, 0).astype(np.float32)
        row = Row(ids, mask, logprobs, mask - np.int32(1), returns, mask - np.int32(1), temperatures, reward)
        row.images = request.images
        if answer.choices is not None:
            row.choices = [answer.choices.at(answer.input_len, answer.output_len)]
        episodes.append(Episode([row], reward))
    pairs = zip(episodes[::2], episodes[1::2], strict=False)
    groups = [GroupResult(number, list(pair), [], {}) for number, pair in enumerate(pairs)]
    actor = ActorConfig(kl_ctl=0.1, use_decoupled_loss=True, ppo_n_minibatches=2)
    reader = reader_of(model)

    def step(device: str) -> dict[str, float]:
        policy, reference = open_trainer(model, device), open_trainer(model, device)
        return PolicyUpdate(policy, actor, reference, seed=1, choices=reader).step(groups).figures

    return [step(device) for device in ("sim", "cpu")]


def resume(model: Path, trainer: TrainingEngine, trained: Any) -> dict[str, Any]:
    """The next step of a trainer, and of one on the CPU that goes on from its state."""
    kept = [value for named in trainer.moments().named.values() for value in named.values()]
    other = open_trainer(model, "cpu")
    with tempfile.TemporaryDirectory() as directory:
        trainer.begin_checkpoint(Path(directory))
        other.load_checkpoint(Path(directory), trainer.state())
    return {
        "devices": sorted({value.device.type for value in kept}),
        "loss": [each.train_batch(trained, loss)["loss"] for each in (trainer, other)],
    }


def in_bfloat16(model: Path, trained: Any, judge: TrainingEngine) -> dict[str, Any]:
    trainer, exact = open_trainer(model, "sim", "bfloat16"), open_trainer(model, "cpu")
    found = trainer.logprobs(trained)
    step = trainer.train_batch(trained, loss)
    return {
        "difference": largest(found, exact.logprobs(trained)),
        "loss": [step["loss"], exact.train_batch(trained, loss)["loss"]],
        "dtypes": sorted({str(each.dtype) for each in (found, trainer.flat, trainer.flat_grad)}),
    }


async def decoder_alone(model: Path) -> dict[str, Any]:
    """What only this package's decoder does: generating in bfloat16, and computing layers again for their gradients."""
    engine, judge = open_engine(model, "bfloat16"), open_trainer(model, "cpu")
    asked = asked_of(model, with_images=False)
    answers = await generate(engine, asked)
    reader = reader_of(model)
    trained = batch(asked, answers, reader)
    trained.fields["weights"] = torch.linspace(0, 0.01, len(trained.temperatures))
    await engine.aclose()
    again = open_trainer(model, "sim", gradient_checkpointing=True)
    return {
        "sampled": largest(sampled(answers), judge.logprobs(trained)),
        "grad_norm": [each.train_batch(trained, loss)["grad_norm"] for each in (again, judge)],
    }


def refusals() -> list[str]:
    """What the device must refuse."""
    there, here = torch.zeros(3, device="sim"), torch.zeros(3)
    mixtures: dict[str, Callable[[], Any]] = {
        "sum": lambda: there + here,
        "single number": lambda: there * here[0],
        "index": lambda: there[torch.tensor([0])],
        "product": lambda: torch.nn.functional.linear(there[None], here[None]),
        "inference": lambda: torch.inference_mode()(lambda: torch.cat((there, here)))(),
    }
    refused = []
    for name, mix in mixtures.items():
        try:
            mix()
        except simulated_device.MixedDevices:
            refused.append(name)
    assert refused == [*mixtures], f"not refused: {set(mixtures) - set(refused)}"
    return refused


def main(names: list[str]) -> None:
    simulated_device.install()
    find = models.find_device
    models.find_device = lambda name, setting: simulated_device.SIM if name == "sim" else find(name, setting)
    figures: dict[str, Any] = {"refused": refusals()}
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            model = MODELS[name](Path(directory))
            figures[name] = asyncio.run(round_of(model, name == "vision"))
            if name in ("builtin", "llama"):
                figures[name]["decoder"] = asyncio.run(decoder_alone(model))
    print(json.dumps(figures))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:] or [*MODELS])
