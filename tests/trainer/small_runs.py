"""A random model, groups of episodes on it, and run directories: what tests of training share."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal.api.io_struct import ModelResponse
from areal.api.messages import Episode, GroupResult, Row
from areal.config.experiment import PPOConfig
from areal.config.presets import resolve
from areal.config.rollout import GenerationHyperparameters
from areal.config.training import ActorConfig, OptimizerConfig
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.model.architecture import Architecture
from areal.engine.model.decoder import initialise
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.trainer.batch import (
    minibatches,
    rows_of_groups,
    token_batch,
    with_advantages,
    without_forced,
    without_truncated,
)
from areal.trainer.critic import ValueUpdate
from areal.trainer.run_directory import RunDirectory
from areal.trainer.update import PolicyUpdate
from areal.trajectory import Renderer, Tree, assign_reward, export
from areal.trajectory.answer import read_answer

VOCABULARY = 272
PROMPT = 5


def make_engine(seed: int = 1, *, value_head: bool = False, **optimizer: Any) -> TrainingEngine:
    architecture = Architecture(
        family="qwen3",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=32,
        max_positions=512,
        tied_embeddings=True,
        value_head=value_head,
    )
    engine = TrainingEngine(architecture, OptimizerConfig(**{"lr": 1e-2, **optimizer}), total_steps=20)
    initialise(engine.decoder, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        engine.decoder.flat *= torch.where(engine.decoder.flat.abs() < 0.5, 10.0, 1.0)
    return engine


@cache
def byte_tokenizer() -> Any:
    return make_tokenizer(["Sort 5291"], 261, 512)


def make_row(draw: np.random.Generator, reward: float, length: int, *, reported: bool = True) -> Row:
    """A prompt of five tokens and one completion."""
    total = PROMPT + length
    mask = np.arange(total) >= PROMPT
    return Row(
        input_ids=draw.integers(0, VOCABULARY, total).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask & reported, draw.normal(-5.0, 0.5, total), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        returns=np.where(mask, reward, 0).astype(np.float32),
        completion_index=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(total, np.float32),
        reward=reward,
        recompute_logprobs=not reported,
    )


def make_group(task_id: int, rewards: Sequence[float], *, seed: int = 0, reported: bool = True) -> GroupResult:
    """An episode of one completion for each reward."""
    draw = np.random.default_rng([seed, task_id])
    rows = [make_row(draw, reward, int(draw.integers(2, 9)), reported=reported) for reward in rewards]
    return GroupResult(task_id, [Episode([row], row.reward, calls=1) for row in rows], [], {0: "digest"})


def make_batch(seed: int = 0, groups: int = 4) -> list[GroupResult]:
    draw = np.random.default_rng(seed)
    return [make_group(number, draw.integers(0, 2, 4).tolist(), seed=seed) for number in range(groups)]


def branching_tree() -> Tree:
    """Two tries, the second with two answers: three turns on two paths."""
    tokenizer = byte_tokenizer()
    tree = Tree(Renderer(tokenizer))

    def say(messages: list[dict[str, str]], answer: str) -> None:
        prompt = tree.prompt(messages)
        output = [*tree.renderer.encode(answer), tokenizer.eos_token_id]
        count = len(tree.completions)
        response = ModelResponse(prompt.ids, output, [-5.0 - count / 7] * len(output), [0] * len(output), "stop")
        read = read_answer(tree.renderer, response, completion_id="", stop_ids=[tokenizer.eos_token_id])
        tree.add(prompt, response, read, completion_id=f"id-{count}", temperature=1.0)

    ask = [{"role": "user", "content": "Sort 21"}]
    again = [*ask, {"role": "assistant", "content": "21"}, {"role": "user", "content": "Wrong"}]
    say(ask, "21")
    say(again, "12")
    say(again, "11 or so")
    assign_reward(tree, {"id-1": 1.0, "id-2": -0.5}, "agent")
    return tree


def group_of(tree: Tree, style: str) -> GroupResult:
    rows = export(tree, style, turn_discount=0.9)  # type: ignore[arg-type]
    other = make_group(0, [0.0, 1.0]).episodes
    return GroupResult(0, [Episode(rows, tree.reward), *other], [], {})


def make_conversation(*messages: dict[str, Any], reward: float = 1.0) -> Episode:
    """An episode of two rows with three trained tokens, two of version 3 and one of version 4."""
    rows = [_versioned_row([-1, -1, 3, 3]), _versioned_row([-1, 4])]
    return Episode(rows=rows, reward=reward, messages=list(messages), calls=2, seconds=0.3125, turns=[(0.1, 0.25, 3)])


def _versioned_row(versions: list[int]) -> Row:
    """-1 = a token of the prompt."""
    array = np.array(versions, dtype=np.int32)
    zeros = np.zeros(len(versions), dtype=np.float32)
    index = np.where(array >= 0, 0, -1)
    return Row(np.arange(len(versions)), array >= 0, zeros, array, zeros, index, zeros + 1, reward=1.0)


def make_token_batch(
    groups: Sequence[GroupResult], actor: ActorConfig, critic: ValueUpdate | None = None
) -> TokenBatch:
    """A batch as one minibatch with its advantages and weights."""
    algorithm = resolve(actor).algorithm
    batch = with_advantages(token_batch(rows_of_groups(groups)), algorithm, 512, critic)
    batch = without_forced(without_truncated(batch) if actor.mask_truncated else batch)
    (whole,) = minibatches(batch, 1, "", algorithm)
    return whole


def gradient_of(groups: Sequence[GroupResult], **settings: Any) -> torch.Tensor:
    """The gradient of one update with one minibatch."""
    engine = make_engine(gradient_clipping=0)
    PolicyUpdate(engine, ActorConfig(**settings), settings.pop("reference", None), seed=1).step(groups)
    return engine.flat_grad.clone()


def make_config(output_dir: Path, **settings: Any) -> PPOConfig:
    settings = {"experiment_name": "test", "trial_name": "one", **settings}
    return PPOConfig(output_dir=str(output_dir), gconfig=GenerationHyperparameters(n_samples=4), **settings)


def make_directory(output_dir: Path, **settings: Any) -> RunDirectory:
    return RunDirectory.open(make_config(output_dir, **settings))
