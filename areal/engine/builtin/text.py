"""The built-in text models: small Qwen3s, warmed up on lessons until they are right often enough to learn from reward.

`builtin:tiny-math` (0.3 million parameters) has begun to learn sorting and sums, and no more. `builtin:tiny-countdown`
is of the same size, for `builtin:countdown`, and right in a third of its answers. Lessons are short conversations on
training problems only. They show the form of an answer and a part of the skill: plain answers, a second try after a
wrong one, calculator calls, so that agents of every kind begin with some success.
"""

import fcntl
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from areal.config.training import OptimizerConfig
from areal.dataset.builtin import COUNTDOWN, TASKS, CountdownProblem, Problem, ProceduralTask
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.model_runner import ModelRunner
from areal.engine.inference.sampler import SamplingParams, sample
from areal.engine.model.architecture import Architecture, write_architecture
from areal.engine.model.decoder import initialise
from areal.engine.model_path import Report
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.supervised import Example, mean_nll, supervised_batch
from areal.reward.countdown import reaches
from areal.utils.cache import cache_directory
from areal.utils.hf_utils import load_hf_tokenizer

_BATCH = 64
MAKING = "making-"
"""How the names of directories begin in which models are made."""
_CHECK_STEPS = 5
"""Steps between two measurements of success."""


def _says_the_answer(text: str, problem: Problem) -> bool:
    return text == problem.answer


@dataclass(frozen=True)
class Recipe:
    """How a built-in text model is made."""

    name: str
    edition: int
    """Part of the cache's name: raise it when anything changes the model."""
    lessons: Callable[[int], Iterator[Example]]
    """An endless stream of conversations, drawn from a seed."""
    task: ProceduralTask[Problem]
    """Its validation problems measure success."""
    right: Callable[[str, Problem], bool] = _says_the_answer
    """Whether an answer is right."""
    answer_tokens: int = 8
    """An answer that has not ended by then is wrong."""
    target_success: float = 0.35
    """Warm-up ends when this share of sampled answers is right."""
    usual_steps: int = 115
    """After which that is so, on most machines: an estimate to show."""
    max_steps: int = 600
    hidden_size: int = 96
    intermediate_size: int = 256
    num_layers: int = 2
    seed: int = 20

    def cached(self, report: Report) -> Path:
        """The model's directory; the model is made now if it is not cached."""
        return cached(f"{self.name}-{self.edition}", self.make, report)

    def make(self, directory: Path, report: Report) -> None:
        """Make the model and write it to `directory` in Hugging Face's format."""
        tokenizer = load_hf_tokenizer(f"builtin:{self.name}")
        engine = TrainingEngine(
            self._architecture(tokenizer),
            OptimizerConfig(lr=3e-3, warmup_steps=50, beta2=0.95),
            total_steps=self.max_steps,
            max_tokens_per_mb=32768,
        )
        initialise(engine.decoder, torch.Generator().manual_seed(self.seed))
        with _one_thread():
            self._warm_up(engine, tokenizer, report)
        engine.save(str(directory))
        tokenizer.save_pretrained(directory)

    def describe(self, directory: Path) -> None:
        """Write the config.json that the model has, whether or not it is made."""
        write_architecture(self._architecture(load_hf_tokenizer(f"builtin:{self.name}")), directory)

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
            max_positions=tokenizer.model_max_length,
            tied_embeddings=True,
            eos_token_ids=(tokenizer.eos_token_id,),
        )

    def _warm_up(self, engine: TrainingEngine, tokenizer: Any, report: Report) -> None:
        stream = self.lessons(self.seed)
        exam = self._exam(tokenizer)
        for step in range(1, self.max_steps + 1):
            engine.train_batch(supervised_batch(list(islice(stream, _BATCH)), tokenizer), mean_nll)
            if step % _CHECK_STEPS == 0:
                success = self._success(engine, tokenizer, exam)
                report(progress_line(self.name, success, self.target_success), step / self.usual_steps)
                if success >= self.target_success:
                    return

    def _exam(self, tokenizer: Any, problems: int = 256) -> list[tuple[Problem, list[int]]]:
        """Validation problems and their prompts."""
        return [
            (problem, tokenizer.apply_chat_template(problem.as_task()["messages"], add_generation_prompt=True))
            for problem in islice(self.task.problems("valid"), problems)
        ]

    def _success(self, engine: TrainingEngine, tokenizer: Any, exam: list[tuple[Problem, list[int]]]) -> float:
        """Share of right answers when each problem is sampled once at temperature 1."""
        prompts = [prompt for _, prompt in exam]
        runner = DecoderRunner(engine.decoder, kernel="torch")  # so that it is the same model everywhere
        texts = sampled_answers(runner, tokenizer, prompts, [()] * len(prompts), self.answer_tokens)
        right = [self.right(text, problem) for text, (problem, _) in zip(texts, exam, strict=True)]
        return right.count(True) / len(exam)


RETRY = "That is wrong. Try again."

CALCULATOR_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "properties": {
                    "a": {"title": "A", "type": "integer"},
                    "b": {"title": "B", "type": "integer"},
                },
                "required": ["a", "b"],
                "title": f"{name}_args",
                "type": "object",
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    for name, description in (("add", "Add two integers."), ("multiply", "Multiply two integers."))
]
"""Tool schemas as the OpenAI Agents SDK writes them for two-integer functions."""


def math_lessons(seed: int) -> Iterator[Example]:
    """An endless stream: sorting with and without tools, sums, second tries, calculator calls."""
    draw = random.Random(seed)
    sorting = cycle(list(TASKS["sort-digits"].problems("train", seed)))
    sums = cycle(list(TASKS["sums"].problems("train", seed)))
    while True:
        kind = draw.random()
        if kind < 0.45:
            yield _plain(next(sorting)), None
        elif kind < 0.55:
            yield _plain(next(sums)), None
        elif kind < 0.65:
            problem = next(sorting)
            yield _second_try(problem, _shuffled(problem.answer, draw)), None
        elif kind < 0.75:
            yield _plain(next(sorting)), CALCULATOR_TOOLS
        else:
            yield _tool_use(next(sums)), CALCULATOR_TOOLS


def _plain(problem: Problem) -> list[dict[str, Any]]:
    return [*problem.as_task()["messages"], {"role": "assistant", "content": problem.answer}]


def _second_try(problem: Problem, wrong: str) -> list[dict[str, Any]]:
    """A wrong answer that is not learned, the request to try again, the right answer."""
    return [
        *problem.as_task()["messages"],
        {"role": "assistant", "content": wrong, "learn": False},
        {"role": "user", "content": RETRY},
        {"role": "assistant", "content": problem.answer},
    ]


def _shuffled(text: str, draw: random.Random) -> str:
    letters = list(text)
    draw.shuffle(letters)
    return "".join(letters)


def _tool_use(problem: Problem) -> list[dict[str, Any]]:
    """A sum done with the calculator."""
    first, second = problem.question.removeprefix("What is ").removesuffix("?").split(" + ")
    call = {"name": "add", "arguments": f'{{"a": {first}, "b": {second}}}'}
    return [
        *problem.as_task()["messages"],
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": problem.answer},
        {"role": "assistant", "content": problem.answer},
    ]


def countdown_lessons(seed: int) -> Iterator[Example]:
    """An endless stream: plain answers, and second tries after an expression that misses the target."""
    draw = random.Random(seed)
    for problem in cycle(list(COUNTDOWN.problems("train", seed))):
        if draw.random() < 0.75:
            yield _plain(problem), None
        else:
            yield _second_try(problem, _missing(problem, draw)), None


def _missing(problem: Problem, draw: random.Random) -> str:
    """The numbers in their order, joined so that they miss the target."""
    assert isinstance(problem, CountdownProblem)
    first, *others = problem.numbers
    while True:
        way = str(first) + "".join(f"{draw.choice('+-')}{number}" for number in others)
        if not _hits(way, problem):
            return way


def _hits(text: str, problem: Problem) -> bool:
    assert isinstance(problem, CountdownProblem)
    return reaches(text, problem.numbers, problem.target)


TINY_MATH = Recipe(name="tiny-math", edition=4, lessons=math_lessons, task=TASKS["sort-digits"])
TINY_COUNTDOWN = Recipe(
    name="tiny-countdown",
    edition=1,
    lessons=countdown_lessons,
    task=COUNTDOWN,
    right=_hits,
    answer_tokens=16,
    target_success=0.3,
    usual_steps=200,
)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Two threads gain little on matrices this small, and lose much where cores are shared (docs/log.md)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def progress_line(name: str, success: float, target: float) -> str:
    return f"making builtin:{name} (once): success {success:.2f} (goal {target:.2f})"


def cached(name: str, make: Callable[[Path, Report], None], report: Report) -> Path:
    """The directory of the model of that name, made now if it is not cached. Several processes may ask at once."""
    target = cache_directory() / name
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        with _own_directory(target.parent) as making:
            make(making, report)
            try:
                os.rename(making, target)
            except OSError:  # another process was faster
                if not (target / "config.json").exists():
                    raise
    return target


@contextmanager
def _own_directory(parent: Path) -> Iterator[Path]:
    """A new directory, which is removed in the end if it is still there, and by `_remove_abandoned` if this process is
    killed."""
    new = Path(tempfile.mkdtemp(dir=parent))
    held = os.open(new, os.O_RDONLY)
    with suppress(OSError):  # where there are no locks, nothing is taken for abandoned either
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    making = new.rename(parent / f"{MAKING}{new.name}")  # only now, when it is locked, may others look at it
    try:
        yield making
    finally:
        shutil.rmtree(making, ignore_errors=True)
        os.close(held)


def _remove_abandoned(parent: Path) -> None:
    """Remove what processes left that were killed while they made a model: the lock of such a directory is free."""
    for each in parent.glob(f"{MAKING}*"):
        with suppress(OSError):  # it is locked, or it has just become a model
            held = os.open(each, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(each, ignore_errors=True)
            finally:
                os.close(held)


def sampled_answers(
    runner: ModelRunner,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    images: Sequence[tuple[bytes, ...]],
    max_tokens: int,
) -> list[str]:
    """Sample each prompt once, at temperature 1 and with fixed seeds; "" if it has not ended by `max_tokens`."""
    params = SamplingParams.of_rows([(1.0, 1.0, 0, seed) for seed in range(len(prompts))])
    outputs: list[list[int]] = [[] for _ in prompts]
    logits = runner.prefill(range(len(prompts)), prompts, images)
    for count in range(max_tokens):
        tokens, *_ = sample(logits, params, [count] * len(prompts))
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
        logits = runner.decode(tokens, [len(prompt) + count for prompt in prompts])
    end = tokenizer.eos_token_id
    return [tokenizer.decode(output[: output.index(end)]) if end in output else "" for output in outputs]
