"""Losses of pairs against closed forms, and their slopes against autograd, in double precision."""

import math

import pytest
import torch
from torch import Tensor

from areal.algorithms.preference import bradley_terry, dpo, preference_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_loss_is_the_cross_entropy_of_a_coin_that_lands_on_the_chosen_side(smoothing: float) -> None:
    margins = [-3.0, 0.0, 0.25, 7.0]
    losses, _ = preference_loss(torch.tensor(margins, dtype=torch.float64), smoothing)
    for margin, loss in zip(margins, losses.tolist(), strict=True):
        chance = 1 / (1 + math.exp(-margin))
        assert loss == pytest.approx(-(1 - smoothing) * math.log(chance) - smoothing * math.log(1 - chance), rel=1e-12)


def test_smoothed_loss_is_least_where_the_chance_is_that_of_a_right_label() -> None:
    _, slope = preference_loss(torch.tensor([math.log(0.9 / 0.1)], dtype=torch.float64), 0.1)
    assert float(slope) == pytest.approx(0.0, abs=1e-15)


def test_extreme_margins_give_finite_losses() -> None:
    losses, slopes = preference_loss(torch.tensor([1e4, -1e4]))
    assert losses.tolist() == [0.0, 1e4]
    assert slopes.tolist() == [0.0, -1.0]


def sums(*seeds: int) -> list[Tensor]:
    return [torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("nll_weight", [0.0, 0.7])
def test_dpo_is_the_loss_of_its_paper_and_its_slopes_are_derivatives(smoothing: float, nll_weight: float) -> None:
    policy, reference = sums(1, 2)
    policy, lengths = (4 * policy).requires_grad_(), torch.arange(1, 41).view(20, 2)
    found = dpo(policy, reference, lengths, 0.4, smoothing, nll_weight)
    implicit_rewards = 0.4 * (policy - reference)
    chance = implicit_rewards.softmax(1)
    written = -(1 - smoothing) * chance[:, 0].log() - smoothing * chance[:, 1].log()
    written = written - nll_weight * policy[:, 0] / lengths[:, 0]
    assert torch.allclose(found.loss, written, atol=1e-12)
    (derivative,) = torch.autograd.grad(written.sum(), policy)
    assert torch.allclose(found.slopes, derivative, atol=1e-12)
    assert torch.equal(found.margins > 0, implicit_rewards[:, 0] > implicit_rewards[:, 1])


def test_reward_model_is_trained_by_the_chance_that_the_chosen_answer_wins() -> None:
    (scores,) = sums(3)
    scores.requires_grad_()
    found = bradley_terry(scores)
    written = -(scores[:, 0].exp() / scores.exp().sum(1)).log()
    assert torch.allclose(found.loss, written, atol=1e-12)
    assert torch.allclose(found.slopes, torch.autograd.grad(written.sum(), scores)[0], atol=1e-12)


def test_pair_without_a_winner_is_half_right() -> None:
    assert bradley_terry(torch.tensor([[1.0, 1.0], [2.0, 1.0]])).means()["accuracy"] == 0.75
