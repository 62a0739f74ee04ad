"""The policy objectives against their closed forms, value and gradient."""

import math

import pytest
import torch
from torch import Tensor

from areal.algorithms.losses import clipped_loss, decoupled_loss, kl_penalty

LOW, HIGH = 0.2, 0.3


def logprob_at(ratio: float, old: float = -1.0) -> Tensor:
    return torch.tensor([old + math.log(ratio)], requires_grad=True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.2, 2.0, -2.4, -2.4, 0.0),
        (1.5, 2.0, -2.6, 0.0, 1.0),  # above the clip, and better would be rewarded: bounded
        (0.5, 2.0, -1.0, -1.0, 0.0),  # below the clip, but the way back is open
        (1.0, -2.0, 2.0, 2.0, 0.0),
        (0.9, -2.0, 1.8, 1.8, 0.0),
        (0.5, -2.0, 1.6, 0.0, 1.0),
        (1.5, -2.0, 3.0, 3.0, 0.0),
        (1.5, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_loss_value_and_gradient(
    ratio: float, advantage: float, loss: float, slope: float, clipped: float
) -> None:
    logprobs = logprob_at(ratio)
    result = clipped_loss(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), LOW, HIGH)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-5)  # d ratio / d logprob = ratio
    assert result.clipped.item() == clipped
    assert result.ratio.item() == pytest.approx(ratio, abs=1e-5)
    assert not result.ratio.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "dual_clipped"),
    [
        (2.9, -2.0, 5.8, 5.8, 0.0),
        (3.1, -2.0, 6.0, 0.0, 1.0),  # -min(rA, cA): a token that became much likelier pulls no more
        (66.0, -2.0, 6.0, 0.0, 1.0),
        (0.5, -2.0, 1.6, 0.0, 0.0),  # the lower clip holds as before
        (66.0, 2.0, -2.6, 0.0, 0.0),  # a positive advantage is bounded by the upper clip
        (66.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(
    ratio: float, advantage: float, loss: float, slope: float, dual_clipped: float
) -> None:
    logprobs = logprob_at(ratio)
    result = clipped_loss(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), LOW, HIGH, 3.0)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-4)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-4)
    assert result.dual_clipped.item() == dual_clipped


def test_without_a_dual_clip_the_loss_of_bad_tokens_grows_with_the_ratio() -> None:
    result = clipped_loss(logprob_at(66.0), torch.tensor([-1.0]), torch.tensor([-2.0]), LOW, HIGH, None)
    assert (result.loss.item(), result.dual_clipped.item()) == (pytest.approx(132.0, rel=1e-5), 0.0)


def test_the_behaviour_weight_multiplies_what_the_dual_clip_leaves() -> None:
    proximal, behaviour = torch.tensor([-2.0]), torch.tensor([-2.0 - math.log(1.5)])
    result = decoupled_loss(
        logprob_at(66.0, old=-2.0), proximal, behaviour, torch.tensor([-2.0]), LOW, HIGH, 5.0, dual_clip=3.0
    )
    assert (result.loss.item(), result.dual_clipped.item()) == (pytest.approx(1.5 * 6.0), 1.0)


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("dual_clip", [3.0, None])
@pytest.mark.parametrize("old", [-3e38, -500.0, 500.0, 3e38])
def test_a_logprob_far_from_the_policys_gives_a_finite_loss_and_gradient(
    old: float, dual_clip: float | None, advantage: float
) -> None:
    logprobs, advantages = torch.tensor([-1.0], requires_grad=True), torch.tensor([advantage])
    plain = clipped_loss(logprobs, torch.tensor([old]), advantages, LOW, HIGH, dual_clip)
    weighted = decoupled_loss(
        logprobs, logprobs.detach(), torch.tensor([old]), advantages, LOW, HIGH, None, dual_clip=dual_clip
    )
    for loss in (plain.loss, weighted.loss):
        assert bool(loss.isfinite().all())
        assert bool(gradient(logprobs, loss).isfinite().all())


def tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprobs, proximal, behaviour = (-torch.rand(50, generator=generator) * 2 for _ in range(3))
    return logprobs.requires_grad_(), proximal, behaviour, torch.randn(50, generator=generator)


def gradient(logprobs: Tensor, loss: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    return grad


@pytest.mark.parametrize("cap", [None, 5.0, 1.0])
def test_decoupled_loss_is_the_clipped_loss_when_proximal_and_behaviour_agree(cap: float | None) -> None:
    logprobs, proximal, _, advantages = tokens()
    plain = clipped_loss(logprobs, proximal, advantages, LOW, HIGH)
    decoupled = decoupled_loss(logprobs, proximal, proximal, advantages, LOW, HIGH, cap)
    torch.testing.assert_close(decoupled.loss, plain.loss)
    torch.testing.assert_close(gradient(logprobs, decoupled.loss), gradient(logprobs, plain.loss))


def test_decoupled_loss_weighs_each_token_by_proximal_over_behaviour() -> None:
    logprobs, proximal, behaviour, advantages = tokens()
    plain = clipped_loss(logprobs, proximal, advantages, LOW, HIGH)
    decoupled = decoupled_loss(logprobs, proximal, behaviour, advantages, LOW, HIGH, None)
    torch.testing.assert_close(decoupled.loss, plain.loss * torch.exp(proximal - behaviour))


def test_decoupled_loss_without_clipping_is_importance_sampling_from_the_behaviour_policy() -> None:
    logprobs, _, behaviour, advantages = tokens()
    decoupled = decoupled_loss(logprobs, logprobs.detach(), behaviour, advantages, LOW, HIGH, None)
    expected = -torch.exp(logprobs - behaviour) * advantages
    torch.testing.assert_close(gradient(logprobs, decoupled.loss), gradient(logprobs, expected))


def test_tokens_beyond_the_weight_cap_are_left_out() -> None:
    logprobs, proximal, behaviour, advantages = tokens()
    weight = torch.exp(proximal - behaviour)
    cap = float(weight.median())
    capped = decoupled_loss(logprobs, proximal, behaviour, advantages, LOW, HIGH, cap)
    free = decoupled_loss(logprobs, proximal, behaviour, advantages, LOW, HIGH, None)
    torch.testing.assert_close(capped.loss, torch.where(weight > cap, 0.0, free.loss))
    assert torch.equal(gradient(logprobs, capped.loss)[weight > cap], torch.zeros(int((weight > cap).sum())))


def test_kl_penalty_is_zero_at_equality_and_positive_elsewhere() -> None:
    logprobs, reference, _, _ = tokens()
    assert torch.equal(kl_penalty(reference, reference), torch.zeros(50))
    assert bool((kl_penalty(logprobs, reference) > 0).all())


def test_kl_penalty_pulls_towards_the_reference() -> None:
    logprobs, reference, _, _ = tokens()
    expected = 1 - torch.exp(reference - logprobs.detach())
    torch.testing.assert_close(gradient(logprobs, kl_penalty(logprobs, reference)), expected)


def test_kl_penalty_is_right_on_average() -> None:
    policy, reference = torch.tensor([1.0, 0.2, -1.0]).log_softmax(0), torch.tensor([0.0, 0.5, 0.1]).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_penalty(policy, reference)).sum(), exact)
