"""The figures that explain an update, in numbers worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import make_batch, make_engine, make_group

from areal.algorithms.correction import Correction
from areal.api.messages import Episode, GroupResult, Node
from areal.config.training import ActorConfig
from areal.engine.training.engine import TokenBatch
from areal.trainer.batch import rows_of_groups, token_batch
from areal.trainer.journal import step_figures
from areal.trainer.update import PolicyUpdate
from areal.trainer.update_figures import batch_figures, effective_share, group_figures, token_figures, weight_figures
from areal.viewer.run_pages import FIRST_FIGURES


def group_of(*rewards: float) -> GroupResult:
    return GroupResult(0, [Episode([], reward) for reward in rewards], [], {})


def test_groups_that_teach_nothing_are_told_apart() -> None:
    figures = group_figures([group_of(1, 1), group_of(0, 0), group_of(0.5, 0.5), group_of(0, 1)])
    assert (figures["groups_equal"], figures["groups_all_right"], figures["groups_all_wrong"]) == (0.75, 0.25, 0.25)
    assert figures["reward_std"] == pytest.approx(np.std([1, 1, 0, 0, 0.5, 0.5, 0, 1]))
    assert not any(name.startswith("reward/") for name in figures)


def node(parent: int | None, reward: float | None) -> Node:
    return Node(parent, True, [], {}, reward, "stop", [], 0.0, 0.0)


def test_rewards_are_told_by_turn() -> None:
    """The third answer continues the first, so it is a second turn too; answers without a reward do not count."""
    first = Episode([], 1.0, nodes=[node(None, None), node(0, 1.0), node(0, 0.0), node(1, 0.5)])
    second = Episode([], 1.0, nodes=[node(None, 0.25)])
    figures = group_figures([GroupResult(0, [first, second], [], {})])
    turns = {name: value for name, value in figures.items() if name.startswith("reward/")}
    assert turns == {"reward/turn1": 0.25, "reward/turn2": 0.5, "reward/turn3": 0.5}


def tokens(**fields: list[Any]) -> TokenBatch:
    found = {name: torch.tensor(values) for name, values in fields.items()}
    return TokenBatch([], torch.ones(len(next(iter(found.values())))), found)


def test_lengths_and_ages_of_completions() -> None:
    figures = batch_figures(
        tokens(completions=[4, 4, 4, 9], versions=[5, 5, 3, 5], truncated=[True, True, True, False]), version=5
    )
    assert figures == {
        "completion_tokens_mean": 2.0,
        "completion_tokens_max": 3.0,
        "truncated_completions": 0.5,
        "staleness/lag0": 0.75,
        "staleness/lag2": 0.25,
    }


def test_distance_to_the_sampler_overall_and_by_age() -> None:
    """r - 1 - log r; a token without a reported log-prob has no distance, and one that was skipped no entropy."""
    batch = tokens(
        behaviour=[-1.0, -1.0, -1.0, -7.0, -1.0],
        versions=[2, 1, 1, 2, 2],
        unreported=[False, False, False, True, False],
    )
    present = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(2), -3.0, math.nan])
    entropies = torch.tensor([0.0, 1.0, 2.0, 3.0, math.nan])
    figures = token_figures([(batch, present, entropies)], version=2)
    up, down = 2 - 1 - math.log(2), 0.5 - 1 + math.log(2)
    assert figures["entropy"] == pytest.approx(1.5)
    assert figures["sampler_kl"] == pytest.approx((0 + up + down) / 3)
    assert figures["sampler_kl/lag0"] == pytest.approx(0)
    assert figures["sampler_kl/lag1"] == pytest.approx((up + down) / 2)
    assert token_figures([], version=2) == {}


def test_weights_are_described_and_an_effective_share_says_how_many_count() -> None:
    weights = torch.tensor([2.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    figures = weight_figures(Correction(weights, torch.tensor([False, False, True, False])))
    assert figures == {
        "behaviour_weight_mean": 1.0,
        "behaviour_weight_max": 2.0,
        "behaviour_weight_masked": 0.25,
        "effective_sample_share": pytest.approx(16 / (4 * 6)),
    }
    assert effective_share(torch.ones(7)) == pytest.approx(1)
    assert effective_share(torch.zeros(3)) == 0


@pytest.mark.slow
def test_an_update_tells_all_of_them() -> None:
    groups = [*make_batch(), make_group(9, [1, 1])]
    update = PolicyUpdate(make_engine(), ActorConfig(ppo_n_minibatches=2), None, seed=1, stale_samples=True)
    learned = update.step(groups)
    figures = step_figures(groups, 0, learned.figures)
    expected = {
        "entropy", "sampler_kl", "sampler_kl/lag0", "ratio_mean", "ratio_max", "behaviour_weight_mean",
        "behaviour_weight_max", "behaviour_weight_masked", "effective_sample_share", "clip_ratio", "clip_low_ratio",
        "clip_high_ratio", "dual_clip_ratio", "reward_std", "groups_equal", "groups_all_right", "groups_all_wrong",
        "completion_tokens_mean", "completion_tokens_max", "truncated", "truncated_completions", "staleness/lag0",
        "trained_share",
    }  # fmt: skip
    assert expected <= figures.keys()
    of_the_loop = {"rejected", "tokens_per_second", "kl"}  # and kl only with a penalty
    assert set(FIRST_FIGURES) - of_the_loop <= figures.keys(), "the viewer opens with what a step tells"
    assert learned.seconds.keys() == {"proximal", "gradient"}
    assert 0 < figures["trained_share"] < 1  # one group teaches nothing
    whole = token_batch(rows_of_groups(groups))
    assert figures["trained_share"] == pytest.approx(figures["trained_tokens"] / len(whole.temperatures))
    assert not any(name.startswith("sum_") for name in figures)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++"])
def test_the_kl_is_told_wherever_the_penalty_is(name: str) -> None:
    batch = token_batch(rows_of_groups(make_batch()))
    difference = make_engine().logprobs(batch) - make_engine(seed=2).logprobs(batch)
    expected = (-difference).exp() + difference - 1 if name == "grpo" else difference
    actor = ActorConfig(algorithm=name, kl_ctl=0.1)
    figures = PolicyUpdate(make_engine(), actor, make_engine(seed=2), seed=1).step(make_batch()).figures
    assert figures["kl"] == pytest.approx(expected.mean().item(), rel=1e-4)
