"""Advantages and losses of a critic: in closed form, and against sums written down token by token."""

import random

import pytest
import torch
from torch import Tensor

from areal.algorithms.values import explained_variance, gae, value_loss


def estimates(
    returns: list[float], values: list[float], completions: list[int] | None = None, **settings: float
) -> list[float]:
    return gae(
        torch.tensor(returns), torch.tensor(values), torch.tensor(completions or [0] * len(values)), **settings
    ).tolist()


def test_with_lambda_one_the_advantage_is_the_return_minus_the_value() -> None:
    assert estimates([2, 2, 2], [0.5, 1, 3]) == [1.5, 1.0, -1.0]


def test_with_lambda_zero_it_is_the_surprise_of_the_next_value() -> None:
    # V' - V of the first two, the return minus V of the last.
    assert estimates([2, 2, 2], [0.5, 1, 3], gae_lambda=0.0) == [0.5, 2.0, -1.0]


def test_discount_and_lambda_in_closed_form() -> None:
    """δ = (0.5·1 - 0.5, 0.5·3 - 1, 2 - 3) = (0, 0.5, -1); each step back counts 0.5 · 0.5."""
    assert estimates([2, 2, 2], [0.5, 1, 3], discount=0.5, gae_lambda=0.5) == [0.0625, 0.25, -1.0]


def test_discounted_return_is_that_of_the_tokens_to_come() -> None:
    """A + V = 0.5^k R for a token with k tokens after it."""
    assert estimates([8, 8, 8, 8], [0, 0, 0, 0], discount=0.5) == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("settings", [{}, {"gae_lambda": 0.0}, {"discount": 0.3, "gae_lambda": 0.7}])
def test_completion_of_one_token_has_its_return_minus_its_value(settings: dict[str, float]) -> None:
    assert estimates([3, -1], [1, 1], [7, 4], **settings) == [2.0, -2.0]


def test_returns_that_fall_within_a_completion_are_rewards_of_their_tokens() -> None:
    """A workflow may say what each token has still to expect: here the rewards 1, 0, 2."""
    assert estimates([3, 2, 2], [1, 1, 1]) == [2.0, 1.0, 1.0]
    assert estimates([3, 2, 2], [1, 1, 1], gae_lambda=0.0) == [1.0, 0.0, 1.0]


def test_nothing_is_no_error() -> None:
    assert estimates([], [], []) == []


def by_hand(returns: list[float], values: list[float], discount: float, gae_lambda: float) -> list[float]:
    """One completion, every advantage as the sum of its own future."""
    last = len(values) - 1
    found = []
    for start in range(len(values)):
        total = 0.0
        for token in range(start, len(values)):
            reward = returns[token] - (returns[token + 1] if token < last else 0.0)
            after = values[token + 1] if token < last else 0.0
            total += (discount * gae_lambda) ** (token - start) * (reward + discount * after - values[token])
        found.append(total)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_estimates_are_those_of_each_completion_alone_wherever_its_tokens_are(seed: int) -> None:
    """Completions of several lengths whose tokens are mixed, each in its own order."""
    draw = random.Random(seed)
    discount, gae_lambda = draw.random(), draw.random()
    lengths = [draw.randint(1, 9) for _ in range(6)]
    returns = [[draw.gauss(0, 1)] * length for length in lengths]
    returns[0] = [draw.gauss(0, 1) for _ in returns[0]]
    values = [[draw.gauss(0, 1) for _ in range(length)] for length in lengths]
    expected = [by_hand(*pair, discount, gae_lambda) for pair in zip(returns, values, strict=True)]
    turns = [number for number, length in enumerate(lengths) for _ in range(length)]
    draw.shuffle(turns)
    places = [(number, turns[:at].count(number)) for at, number in enumerate(turns)]

    def mixed(each: list[list[float]]) -> list[float]:
        return [each[number][place] for number, place in places]

    found = estimates(
        mixed(returns), mixed(values), [100 - number for number in turns], discount=discount, gae_lambda=gae_lambda
    )
    assert found == pytest.approx(mixed(expected), abs=1e-6)


def loss_of(value: float, old: float, target: float, eps_clip: float | None) -> tuple[float, float, float]:
    """Loss, share that was clipped, gradient."""
    values = torch.tensor([value], requires_grad=True)
    found = value_loss(values, torch.tensor([old]), torch.tensor([target]), eps_clip)
    found.loss.sum().backward()
    gradient: Tensor | None = values.grad
    assert gradient is not None
    return float(found.loss.detach()), float(found.clipped), float(gradient)


def test_without_a_clip_the_loss_is_half_the_squared_error() -> None:
    assert loss_of(3.0, 0.0, 1.0, None) == (2.0, 0.0, 2.0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, (0.28125, 0.0, -0.75)),  # still near to the old value of 0
        (0.75, (0.125, 1.0, 0.0)),  # nearer to the target than is believed at once: (0.5 - 1)² / 2
        (-1.0, (2.0, 0.0, -2.0)),  # farther from the target than the bound, so pulled back
    ],
)
def test_clipped_value_counts_if_its_error_is_larger(value: float, expected: tuple[float, float, float]) -> None:
    assert loss_of(value, 0.0, 1.0, 0.5) == expected


def test_value_that_the_clip_does_not_hold_is_not_counted_as_clipped() -> None:
    """Not even by the rounding of a sum."""
    draw = torch.Generator().manual_seed(0)
    values, old, targets = torch.randn((3, 1000), generator=draw)
    assert not value_loss(values, old, targets, eps_clip=10.0).clipped.any()


@pytest.mark.parametrize("eps_clip", [None, 0.2, 0.7])
def test_value_loss_is_that_written_in_plain_numbers(eps_clip: float | None) -> None:
    draw = random.Random(3)
    rows = [tuple(draw.gauss(0, 1) for _ in range(3)) for _ in range(50)]
    for value, old, target in rows:
        error = (value - target) ** 2
        if eps_clip is not None:
            error = max(error, (min(max(value, old - eps_clip), old + eps_clip) - target) ** 2)
        assert loss_of(value, old, target, eps_clip)[0] == pytest.approx(error / 2, rel=1e-6, abs=1e-6)


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns + 5, returns) == pytest.approx(1)
    assert explained_variance(torch.full((4,), 7.0), returns) == pytest.approx(0)
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(4)) is None
