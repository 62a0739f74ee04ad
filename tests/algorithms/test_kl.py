"""KL estimates and the entropy bonus against the exact figures of a small distribution, value and gradient."""

import pytest
import torch
from torch import Tensor

from areal.algorithms.entropy import negative_entropy
from areal.algorithms.stages import VARIANTS

LOGITS = torch.tensor([1.0, 0.2, -1.0, 0.4], dtype=torch.float64)
REFERENCE = torch.tensor([0.0, 0.5, 0.1, -0.6], dtype=torch.float64).log_softmax(0)
SAMPLER = torch.tensor([0.7, -0.4, 0.3, 0.0], dtype=torch.float64).log_softmax(0)


def mean_gradient(estimate: str, sampler: Tensor | None = None) -> tuple[float, Tensor]:
    """The expectation of an estimate over a sampler's tokens, by enumeration, and of its gradient by the logits."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    drawn = policy.detach() if sampler is None else sampler
    values = VARIANTS["kl"][estimate](policy - REFERENCE, policy - drawn)
    mean = (drawn.exp() * values).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    return mean.item(), gradient


def exact(kind: str) -> tuple[float, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    first, second = (policy, REFERENCE) if kind == "reverse" else (REFERENCE, policy)
    value = (first.exp() * (first - second)).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    return value.item(), gradient


@pytest.mark.parametrize("estimate", ["k1", "k3", "k3_corrected"])
def test_k1_and_k3_are_right_on_average(estimate: str) -> None:
    assert mean_gradient(estimate)[0] == pytest.approx(exact("reverse")[0])


def test_k1_as_a_loss_pulls_nowhere() -> None:
    assert float(mean_gradient("k1")[1].abs().max()) < 1e-12


def test_k2_as_a_loss_has_the_gradient_of_the_reverse_kl() -> None:
    torch.testing.assert_close(mean_gradient("k2")[1], exact("reverse")[1])


def test_k3_as_a_loss_has_the_gradient_of_the_forward_kl() -> None:
    torch.testing.assert_close(mean_gradient("k3")[1], exact("forward")[1])
    assert float((exact("forward")[1] - exact("reverse")[1]).abs().max()) > 0.01


def test_corrected_k3_has_value_and_gradient_of_the_reverse_kl_whoever_sampled() -> None:
    for sampler in (None, SAMPLER):
        value, gradient = mean_gradient("k3_corrected", sampler)
        assert value == pytest.approx(exact("reverse")[0])
        torch.testing.assert_close(gradient, exact("reverse")[1])


def test_k3_is_zero_at_equality_and_positive_elsewhere() -> None:
    k3 = VARIANTS["kl"]["k3"]
    values = torch.linspace(-3, 3, 31, dtype=torch.float64)
    assert bool((k3(values, values) >= 0).all())
    assert k3(torch.zeros(1), torch.zeros(1)).item() == 0


def test_the_entropy_bonus_has_value_and_gradient_of_the_entropy_whoever_sampled() -> None:
    for sampler in (LOGITS.log_softmax(0), SAMPLER):
        logits = LOGITS.clone().requires_grad_()
        policy = logits.log_softmax(0)
        mean = (sampler.exp() * negative_entropy(policy, policy - sampler)).sum()
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        entropy = -(policy.exp() * policy).sum()
        (expected,) = torch.autograd.grad(entropy, logits)
        assert mean.item() == pytest.approx(-entropy.item())
        torch.testing.assert_close(found, -expected)
