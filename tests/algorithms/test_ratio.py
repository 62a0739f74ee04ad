"""The ratio of a whole completion: its value, its gradient, and that cutting it over passes changes neither."""

import pytest
import torch
from torch import Tensor

from areal.algorithms.ratio import Completions, sequence_ratio, token_ratio

COMPLETIONS = torch.tensor([4, 4, 4, 7, 7, 1])


def log_ratio() -> Tensor:
    return torch.tensor([0.1, -0.3, 0.5, 0.2, 0.4, -0.7], dtype=torch.float64, requires_grad=True)


def test_of_tokens_the_ratio_is_their_own() -> None:
    values = log_ratio()
    assert token_ratio(values, None) is values


def test_of_a_sequence_it_is_the_geometric_mean() -> None:
    found = sequence_ratio(log_ratio(), Completions.of(COMPLETIONS))
    torch.testing.assert_close(found.detach(), torch.tensor([0.1, 0.1, 0.1, 0.3, 0.3, -0.7], dtype=torch.float64))


def test_the_gradient_of_a_mean_over_completions_is_that_of_the_sequence_ratio_itself() -> None:
    """Σ over completions of f(s) / C, against f(s_token) summed with 1 / (C T) for each of T tokens."""
    weights = torch.tensor([1 / 9] * 3 + [1 / 6] * 2 + [1 / 3], dtype=torch.float64)
    values = log_ratio()
    tokens = (weights * sequence_ratio(values, Completions.of(COMPLETIONS)).exp().square()).sum()
    (found,) = torch.autograd.grad(tokens, values)
    plain = log_ratio()
    whole = sum(plain[each == COMPLETIONS].mean().exp().square() for each in (4, 7, 1)) / 3
    (expected,) = torch.autograd.grad(whole, plain)
    torch.testing.assert_close(found, expected)
    assert tokens.item() == pytest.approx(whole.item())


def test_cut_over_passes_each_token_has_the_same_value_and_gradient() -> None:
    values = log_ratio()
    whole = sequence_ratio(values, Completions.of(COMPLETIONS)).exp()
    (expected,) = torch.autograd.grad(whole.sum(), values)
    everything = Completions.of(COMPLETIONS)
    sums = everything.sum(values.detach())
    found = torch.zeros_like(expected)
    for part in (torch.tensor([0, 3]), torch.tensor([1, 4, 5]), torch.tensor([2])):
        own = values.detach()[part].requires_grad_()
        _, index = torch.unique(COMPLETIONS[part], return_inverse=True)
        ratio = sequence_ratio(own, Completions(index, everything.tokens_N[part], sums[part])).exp()
        torch.testing.assert_close(ratio, whole[part])
        (found[part],) = torch.autograd.grad(ratio.sum(), own)
    torch.testing.assert_close(found, expected)


def test_nothing_has_no_ratio() -> None:
    empty = torch.empty(0)
    assert sequence_ratio(empty, Completions.of(torch.empty(0, dtype=torch.int64))).shape == (0,)
