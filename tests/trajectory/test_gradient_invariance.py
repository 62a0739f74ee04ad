"""However a tree is cut into rows, the same tokens pull the same way: individual, concat, any split, one gradient."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from chat_tokenizers import STYLES, chat_tokenizer
from scripted_talk import Talk

from areal.api.messages import Episode, GroupResult, Row
from areal.config.presets import PRESETS, resolve
from areal.config.training import ActorConfig, CriticConfig, OptimizerConfig
from areal.engine.model.architecture import Architecture
from areal.engine.model.decoder import initialise
from areal.engine.training.engine import TrainingEngine
from areal.trainer.critic import ValueUpdate
from areal.trainer.update import PolicyUpdate
from areal.trajectory import Renderer, Tree, assign_reward, export, nodes_of

pytestmark = pytest.mark.slow

SMALL = Architecture(
    family="qwen3",
    vocab_size=320,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=32,
    max_positions=2048,
    tied_embeddings=True,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by more threads, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradient_of(
    groups: list[GroupResult], max_tokens: int = 16384, *, critic: bool = False, **settings: Any
) -> torch.Tensor:
    """Of the policy, and of the critic if there is one."""
    engines = [random_engine(SMALL, max_tokens)]
    actor, values = ActorConfig(**settings), None
    if critic:
        engines.append(random_engine(replace(SMALL, value_head=True), max_tokens))
        values = ValueUpdate(engines[1], CriticConfig(), actor, turn_discount=0.9)
    penalty = resolve(actor, reference=True).algorithm.kl_ctl
    reference = random_engine(SMALL, max_tokens, seed=4) if penalty else None
    PolicyUpdate(engines[0], actor, reference, seed=1, critic=values, max_new_tokens=40).step(groups)
    return torch.cat([engine.flat_grad for engine in engines])


def random_engine(architecture: Architecture, max_tokens: int, seed: int = 3) -> TrainingEngine:
    """In float64: what processors round differently in float32 is as much as a small error."""
    optimizer = OptimizerConfig(gradient_clipping=0)
    torch.set_default_dtype(torch.float64)
    try:
        engine = TrainingEngine(architecture, optimizer, total_steps=2, max_tokens_per_mb=max_tokens)
    finally:
        torch.set_default_dtype(torch.float32)
    initialise(engine.decoder, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        engine.decoder.flat *= torch.where(engine.decoder.flat.abs() < 0.5, 10.0, 1.0)
    return engine


def random_tree(style: str, seed: int) -> Tree:
    """Turns, siblings and branches; templates that drop thinking begin branches of their own."""
    random = Random(seed)
    chat = Talk(Tree(Renderer(chat_tokenizer(style))))
    threads: list[list[dict[str, Any]]] = [[]]
    for turn in range(random.randint(3, 6)):
        messages = [*random.choice(threads[-3:]), {"role": "user", "content": f"question {random.randrange(9)}"}]
        text = f"answer {turn}" if random.random() < 0.5 else f"<think>hm {turn}</think>{'so ' * random.randint(1, 4)}"
        node = chat.say(messages, text, temperature=random.choice([0.7, 1.0]))
        node.logprobs = np.asarray([random.gauss(-6, 0.3) for _ in node.output_ids], np.float32)
        threads.append([*messages, node.message])
    rewarded = random.sample(chat.tree.completions, k=2)
    assign_reward(chat.tree, {node.id: random.choice([-1.0, 0.5, 1.0, 2.0]) for node in rewarded}, "agent")
    return chat.tree


def split_row(row: Row, random: Random) -> list[Row]:
    """A row as several, each training some of its completions and reading the others as prompt."""
    indices = sorted(set(row.completion_index[row.loss_mask].tolist()))
    homes = {index: random.randrange(len(indices)) for index in indices}
    parts = []
    for home in sorted(set(homes.values())):
        kept = np.isin(row.completion_index, [index for index in indices if homes[index] == home]) & row.loss_mask
        end = int(np.flatnonzero(kept).max()) + 1
        parts.append(_only(row, kept, end))
    random.shuffle(parts)
    return parts


def split_tokens(row: Row, random: Random) -> list[Row]:
    """A row as several, each training some of its tokens, wherever these are in a completion."""
    homes = np.array([random.randrange(3) for _ in row.loss_mask])
    parts = [row.loss_mask & (homes == home) for home in range(3)]
    made = [_only(row, kept, int(np.flatnonzero(kept).max()) + 1) for kept in parts if kept.any()]
    random.shuffle(made)
    return made


def _only(row: Row, kept: Any, end: int) -> Row:
    def cut(values: Any, prompt: float) -> Any:
        return np.where(kept, values, prompt).astype(values.dtype)[:end]

    return replace(
        row,
        input_ids=row.input_ids[:end],
        loss_mask=kept[:end],
        logprobs=cut(row.logprobs, 0),
        versions=cut(row.versions, -1),
        returns=cut(row.returns, 0),
        completion_index=cut(row.completion_index, -1),
        temperatures=cut(row.temperatures, 1),
    )


def groups_of(trees: list[list[Tree]], cut: Any) -> list[GroupResult]:
    return [
        GroupResult(number, [Episode(cut(tree), tree.reward, nodes=nodes_of(tree)) for tree in group], [], {})
        for number, group in enumerate(trees)
    ]


def individual(tree: Tree) -> list[Row]:
    return export(tree, "individual", 0.9)


def concat(tree: Tree) -> list[Row]:
    return export(tree, "concat", 0.9)


@pytest.mark.parametrize(
    "settings",
    [
        {"eps_clip": 0.9, "loss_norm": "token", "adv_norm": "none"},
        {"eps_clip": 0.9, "loss_norm": "completion", "adv_norm": "group"},
        {"eps_clip": 0.9, "loss_norm": "token", "adv_norm": "batch", "group_baseline": "none"},
        {"loss_norm": "completion", "adv_norm": "batch", "use_decoupled_loss": True, "behave_imp_weight_cap": None},
        {"eps_clip": 0.9, "loss_norm": "token", "adv_norm": "none", "recompute_logprob": True},
        {"critic": True, "group_baseline": "none", "gae_lambda": 0.8, "discount": 0.9, "adv_norm": "batch"},
        {"critic": True, "group_baseline": "none", "gae_lambda": 0.0, "loss_norm": "completion"},
        {"critic": True, "group_baseline": "none", "gae_lambda": 0.8, "gae_over": "episode", "discount": 0.9},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
@pytest.mark.parametrize("style", ["chatml", "qwen3", "deepseek_r1"])
def test_every_way_of_cutting_a_tree_gives_one_gradient(style, settings):
    trees = [[random_tree(style, 10 * group + sample) for sample in range(3)] for group in range(2)]
    expected = gradient_of(groups_of(trees, individual), **settings)
    assert float(expected.norm()) > 1e-3
    ways = {"concat": gradient_of(groups_of(trees, concat), **settings)}
    for seed in range(4):
        random = Random(seed)
        cut = groups_of(
            trees, lambda tree, random=random: [part for row in concat(tree) for part in split_row(row, random)]
        )
        ways[f"split {seed}"] = gradient_of(cut, max_tokens=random.choice([64, 300, 16384]), **settings)
    for way, gradient in ways.items():
        difference = float((gradient - expected).abs().max())
        assert difference <= 1e-8 * max(1.0, float(expected.abs().max())), way


PRESET_CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in PRESETS if name != "ppo"},
    "ppo": {"algorithm": "ppo", "critic": True},
    "gspo+decoupled": {"algorithm": "gspo+decoupled"},
    "gspo wide": {"algorithm": "gspo", "eps_clip": 0.9, "eps_clip_higher": 0.9},
    "sapo of sequences": {"algorithm": "sapo", "ratio": "sequence"},
    "sequence weights": {"algorithm": "dapo+decoupled", "correction": "sequence", "correction_bound": "truncate"},
    "episodes": {"loss_norm": "episode", "group_baseline": "leave_one_out", "entropy_coef": 0.01},
}


@pytest.mark.parametrize("case", PRESET_CASES)
def test_every_way_of_cutting_gives_one_gradient_with_every_preset(case):
    """Cut between completions and within them, in passes of any size."""
    settings = PRESET_CASES[case]
    trees = [[random_tree("qwen3", 10 * group + sample) for sample in range(3)] for group in range(2)]
    expected = gradient_of(groups_of(trees, individual), **settings)
    assert float(expected.norm()) > 1e-5
    random = Random(case)

    def between(tree: Tree) -> list[Row]:
        return [part for row in concat(tree) for part in split_row(row, random)]

    def within(tree: Tree) -> list[Row]:
        return [part for row in concat(tree) for part in split_tokens(row, random)]

    # A critic's estimates go from token to token, in the order of rows.
    ways = {"concat": concat, "between": between} | ({} if settings.get("critic") else {"within": within})
    for way, cut in ways.items():
        for max_tokens in (64, 300):
            found = gradient_of(groups_of(trees, cut), max_tokens=max_tokens, **settings)
            difference = float((found - expected).abs().max())
            assert difference <= 1e-8 * max(1.0, float(expected.abs().max())), (way, max_tokens)


@pytest.mark.parametrize("style", STYLES)
def test_both_styles_train_every_sampled_token_once(style):
    for seed in range(5):
        tree = random_tree(style, seed)
        sampled = sum(len(node.output_ids) for node in tree.completions)
        for rows in (individual(tree), concat(tree)):
            assert sum(int(row.loss_mask.sum()) for row in rows) == sampled
        assert len(concat(tree)) <= len(individual(tree))
