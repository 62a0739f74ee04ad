"""How a built-in text model is made: a small Qwen3, warmed up on lessons until it is right often enough."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from areal.config.actor import OptimizerConfig
from areal.dataset.procedural import Problem, ProceduralTask
from areal.engine.architecture import Architecture
from areal.engine.builtin.answers import sampled_answers
from areal.engine.builtin.cache import Report, cached
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.decoder import initialise
from areal.engine.runner import Runner
from areal.engine.supervised import Example, mean_nll, supervised_batch
from areal.engine.training import TrainingEngine

MAX_POSITIONS = 8192
BATCH = 64
CHECK_STEPS = 5
"""Between two looks at how often it is right."""


def says_the_answer(text: str, problem: Problem) -> bool:
    return text == problem.answer


@dataclass(frozen=True)
class Recipe:
    name: str
    edition: int
    """Part of the cache's name: raise it when anything changes the model."""
    lessons: Callable[[int], Iterator[Example]]
    """An endless stream of conversations, drawn from a seed."""
    task: ProceduralTask
    """What warm-up is measured on: its validation problems."""
    right: Callable[[str, Problem], bool] = says_the_answer
    """Whether an answer is right."""
    answer_tokens: int = 8
    """An answer that has not ended by then is wrong."""
    enough: float = 0.35
    """Warm-up ends when this share of sampled answers is right."""
    max_steps: int = 600
    vocabulary: int = 512
    hidden_size: int = 96
    intermediate_size: int = 256
    num_layers: int = 2
    seed: int = 20

    def cached(self, report: Report) -> Path:
        """The model's directory; the model is made now if it is not there."""
        return cached(f"{self.name}-{self.edition}", self.make, report)

    def make(self, directory: Path, report: Report) -> None:
        """Make the model and write it to `directory` in Hugging Face's format."""
        tokenizer = self._tokenizer()
        engine = TrainingEngine(
            self._architecture(tokenizer),
            OptimizerConfig(lr=3e-3, warmup_steps=50, beta2=0.95),
            total_steps=self.max_steps,
            max_tokens_per_mb=32768,
        )
        initialise(engine.decoder, torch.Generator().manual_seed(self.seed))
        self._warm_up(engine, tokenizer, report)
        engine.save(str(directory))
        tokenizer.save_pretrained(directory)

    def _tokenizer(self) -> Any:
        corpus = (json.dumps(lesson) for lesson in islice(self.lessons(self.seed), 2000))
        return make_tokenizer(corpus, self.vocabulary, MAX_POSITIONS)

    def _architecture(self, tokenizer: Any) -> Architecture:
        return Architecture(
            family="qwen3",
            vocab_size=-(-len(tokenizer) // 16) * 16,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            intermediate_size=self.intermediate_size,
            max_positions=MAX_POSITIONS,
            tied_embeddings=True,
            eos_token_ids=(tokenizer.eos_token_id,),
        )

    def _warm_up(self, engine: TrainingEngine, tokenizer: Any, report: Report) -> None:
        stream = self.lessons(self.seed)
        for step in range(1, self.max_steps + 1):
            engine.train_batch(supervised_batch(list(islice(stream, BATCH)), tokenizer), mean_nll)
            if step % CHECK_STEPS == 0:
                success = self._success(engine, tokenizer)
                report(f"warming up the built-in model: step {step}, success {success:.2f} of {self.enough:.2f}")
                if success >= self.enough:
                    return

    def _success(self, engine: TrainingEngine, tokenizer: Any, problems: int = 256) -> float:
        """Share of right answers when each validation problem is sampled once at temperature 1."""
        drawn = list(islice(self.task.problems("valid"), problems))
        prompts = [
            tokenizer.apply_chat_template(problem.as_task()["messages"], add_generation_prompt=True, return_dict=False)
            for problem in drawn
        ]
        runner = Runner(engine.decoder)
        texts = sampled_answers(runner, tokenizer, prompts, [()] * len(prompts), self.answer_tokens)
        right = [self.right(text, problem) for text, problem in zip(texts, drawn, strict=True)]
        return right.count(True) / len(drawn)
