"""The policy objectives against their closed forms, value and gradient."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.algorithms.objective import PolicyLoss
from areal.algorithms.ratio import log_ratios
from areal.algorithms.stages import VARIANTS
from areal.config.algorithm import Algorithm
from areal.config.presets import resolve
from areal.config.training import ActorConfig

LOW, HIGH = 0.2, 0.3


def algorithm(**settings: Any) -> Algorithm:
    return replace(resolve(ActorConfig()).algorithm, **{"eps_clip": LOW, "eps_clip_higher": HIGH, **settings})


def computed(
    objective: str, ratio: float, advantage: float, *, old: float = -1.0, **settings: Any
) -> tuple[PolicyLoss, float]:
    """A token's loss, and its slope by the log-prob."""
    logprobs = torch.tensor([old + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    log_ratio = log_ratios(logprobs, torch.tensor([old], dtype=torch.float64))
    advantages = torch.tensor([advantage], dtype=torch.float64)
    found = VARIANTS["objective"][objective](logprobs, log_ratio, advantages, algorithm(**settings))
    (slope,) = torch.autograd.grad(found.loss.sum(), logprobs)
    return found, slope.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.2, 2.0, -2.4, -2.4, None),
        (1.5, 2.0, -2.6, 0.0, "high"),  # above the clip, and better would be rewarded: bounded
        (0.5, 2.0, -1.0, -1.0, None),  # below the clip, but the way back is open
        (1.0, -2.0, 2.0, 2.0, None),
        (0.9, -2.0, 1.8, 1.8, None),
        (0.5, -2.0, 1.6, 0.0, "low"),
        (1.5, -2.0, 3.0, 3.0, None),
        (2.9, -2.0, 5.8, 5.8, None),
        (3.1, -2.0, 6.0, 0.0, "dual"),  # -min(rA, cA): a token that became much likelier pulls no more
        (66.0, -2.0, 6.0, 0.0, "dual"),
        (66.0, 2.0, -2.6, 0.0, "high"),  # a positive advantage is bounded by the upper clip
        (66.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_clip_value_gradient_and_which_bound_holds(
    ratio: float, advantage: float, loss: float, slope: float, clipped: str | None
) -> None:
    found, found_slope = computed("clip", ratio, advantage)
    assert found.loss.item() == pytest.approx(loss)
    assert found_slope == pytest.approx(slope)  # d ratio / d logprob = ratio
    held = {"low": found.clipped_low, "high": found.clipped_high, "dual": found.dual_clipped}
    assert {name for name, value in held.items() if value.item()} == ({clipped} - {None})


def test_without_a_dual_clip_the_loss_of_bad_tokens_grows_with_the_ratio() -> None:
    found, slope = computed("clip", 66.0, -2.0, dual_clip=None)
    assert (found.loss.item(), slope, found.dual_clipped.item()) == (pytest.approx(132), pytest.approx(132), 0)


@pytest.mark.parametrize("advantage", [-2.0, 1.5])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 7.0])
def test_importance_and_reinforce_are_what_they_say(ratio: float, advantage: float) -> None:
    found, slope = computed("importance", ratio, advantage)
    assert (found.loss.item(), slope) == (pytest.approx(-ratio * advantage), pytest.approx(-ratio * advantage))
    found, slope = computed("reinforce", ratio, advantage)
    assert found.loss.item() == pytest.approx(-advantage * (-1 + math.log(ratio)))
    assert slope == pytest.approx(-advantage)


@pytest.mark.parametrize("advantage", [-2.0, 1.5])
@pytest.mark.parametrize(
    ("ratio", "weight", "low", "high"), [(0.5, 0.8, 1, 0), (0.9, 0.9, 0, 0), (1.2, 1.2, 0, 0), (9.0, 1.3, 0, 1)]
)
def test_cispo_weighs_the_log_prob_by_the_clipped_ratio_and_keeps_every_gradient(
    ratio: float, weight: float, low: int, high: int, advantage: float
) -> None:
    found, slope = computed("cispo", ratio, advantage)
    assert found.loss.item() == pytest.approx(-weight * advantage * (-1 + math.log(ratio)))
    assert slope == pytest.approx(-weight * advantage)
    assert (found.clipped_low.item(), found.clipped_high.item()) == (low, high)


@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("advantage", "temperature"), [(1.5, 1.0), (-2.0, 1.05)])
def test_sapo_is_a_sigmoid_whose_slope_at_one_is_that_of_the_ratio(
    ratio: float, advantage: float, temperature: float
) -> None:
    found, slope = computed("sapo", ratio, advantage)
    gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
    assert found.loss.item() == pytest.approx(-4 / temperature * gate * advantage)
    assert slope == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage)
    if ratio == 1:
        assert slope == pytest.approx(-advantage)


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("old", [-3e38, -500.0, 500.0, 3e38])
@pytest.mark.parametrize("objective", ["clip", "importance", "cispo", "sapo", "reinforce"])
def test_a_logprob_far_from_the_policys_gives_a_finite_loss_and_gradient(
    objective: str, old: float, advantage: float
) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    log_ratio = log_ratios(logprobs, torch.tensor([old]))
    found = VARIANTS["objective"][objective](logprobs, log_ratio, torch.tensor([advantage]), algorithm())
    (slope,) = torch.autograd.grad(found.loss.sum(), logprobs, allow_unused=True)
    assert bool(found.loss.isfinite().all())
    assert slope is None or bool(slope.isfinite().all())


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logprobs, old = (-torch.rand(50, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    return logprobs.requires_grad_(), old, torch.randn(50, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("objective", ["clip", "importance", "cispo", "sapo", "reinforce"])
def test_on_policy_every_objective_has_the_gradient_of_reinforce(objective: str) -> None:
    logprobs, _, advantages = tokens()
    log_ratio = log_ratios(logprobs, logprobs.detach())
    found = VARIANTS["objective"][objective](logprobs, log_ratio, advantages, algorithm())
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    torch.testing.assert_close(gradient, -advantages)
