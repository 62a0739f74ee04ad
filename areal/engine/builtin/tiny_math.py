"""`builtin:tiny-math`: a 0.3-million-parameter Qwen3 that has begun to learn sorting and sums, and no more."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from areal.config.actor import OptimizerConfig
from areal.dataset.procedural import TASKS
from areal.engine.architecture import Architecture
from areal.engine.builtin.lessons import lessons
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.decoder import initialise
from areal.engine.runner import Runner
from areal.engine.sampler import Choices, sample
from areal.engine.supervised import mean_nll, supervised_batch
from areal.engine.training import TrainingEngine

RECIPE = 4
"""Part of the cache's name: raise it when anything below changes the model."""
SEED = 20
VOCABULARY = 512
MAX_POSITIONS = 8192
BATCH = 64
ENOUGH = 0.35
"""Warm-up ends when this share of sampled answers on validation problems is right."""
MAX_STEPS = 600

Report = Callable[[str], None]


def make(directory: Path, report: Report) -> None:
    """Make the model and write it to `directory` in Hugging Face's format."""
    tokenizer = _tokenizer()
    architecture = Architecture(
        family="qwen3",
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_positions=MAX_POSITIONS,
        tied_embeddings=True,
        eos_token_ids=(tokenizer.eos_token_id,),
    )
    engine = TrainingEngine(
        architecture,
        OptimizerConfig(lr=3e-3, warmup_steps=50, beta2=0.95),
        total_steps=MAX_STEPS,
        max_tokens_per_mb=32768,
    )
    initialise(engine.decoder, torch.Generator().manual_seed(SEED))
    _warm_up(engine, tokenizer, report)
    engine.save(str(directory))
    tokenizer.save_pretrained(directory)


def _tokenizer() -> Any:
    corpus = (json.dumps(lesson) for lesson in islice(lessons(SEED), 2000))
    return make_tokenizer(corpus, VOCABULARY, MAX_POSITIONS)


def _warm_up(engine: TrainingEngine, tokenizer: Any, report: Report) -> None:
    stream = lessons(SEED)
    for step in range(1, MAX_STEPS + 1):
        engine.train_batch(supervised_batch(list(islice(stream, BATCH)), tokenizer), mean_nll)
        if step % 5 == 0:
            success = _success(engine, tokenizer)
            report(f"warming up the built-in model: step {step}, success {success:.2f} of {ENOUGH:.2f}")
            if success >= ENOUGH:
                return


def _success(engine: TrainingEngine, tokenizer: Any, problems: int = 256) -> float:
    """Share of right answers when each validation problem is sampled once at temperature 1."""
    drawn = list(islice(TASKS["sort-digits"].problems("valid"), problems))
    prompts = [
        tokenizer.apply_chat_template(problem.as_task()["messages"], add_generation_prompt=True, return_dict=False)
        for problem in drawn
    ]
    runner = Runner(engine.decoder)
    outputs: list[list[int]] = [[] for _ in drawn]
    choices = Choices.of([(1.0, 1.0, 0, seed) for seed in range(problems)])
    logits = runner.prefill(range(problems), prompts)
    for count in range(8):
        tokens, _ = sample(logits, choices, [count] * problems)
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
        logits = runner.decode(tokens, [len(prompt) + count for prompt in prompts])
    end = tokenizer.eos_token_id
    texts = [tokenizer.decode(output[: output.index(end)]) if end in output else "" for output in outputs]
    right = [text == problem.answer for text, problem in zip(texts, drawn, strict=True)]
    return right.count(True) / problems


def cache_directory() -> Path:
    base = os.environ.get("AREAL_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "areal"
    )
    return Path(base)


def cached(report: Report) -> Path:
    """The model's directory, made now if it is not there. Safe when several processes ask at once."""
    target = cache_directory() / f"tiny-math-{RECIPE}"
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix="making-", dir=target.parent))
        try:
            make(making, report)
            os.rename(making, target)
        except OSError:
            if not (target / "config.json").exists():
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return target
