"""Advantages and losses of a critic: in closed form, and against sums written down token by token."""

import random

import pytest
import torch
from torch import Tensor

from areal.algorithms.values import Turns, explained_variance, gae, value_loss


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


TURNS = [0, 0, 1, 1, 2]
"""Two tokens, then two, then one."""
ROOT = -1


def through_turns(
    returns: list[float],
    values: list[float],
    parents: list[int],
    completions: list[int] = TURNS,
    turn_discount: float = 1.0,
    **settings: float,
) -> list[float]:
    """`parents` by completion."""
    turns = Turns(torch.tensor([parents[completion] for completion in completions]), turn_discount)
    return gae(torch.tensor(returns), torch.tensor(values), torch.tensor(completions), turns=turns, **settings).tolist()


@pytest.mark.parametrize("parents", [[ROOT, 0, 1], [ROOT, 0, 0], [ROOT, ROOT, 1]])
@pytest.mark.parametrize("turn_discount", [1.0, 0.5, 0.0])
def test_with_lambda_one_turns_change_nothing(parents: list[int], turn_discount: float) -> None:
    returns, values = [3, 3, -1, -1, 2], [0.5, 1, 3, -2, 7]
    found = through_turns(returns, values, parents, turn_discount=turn_discount)
    assert found == pytest.approx(estimates(returns, values, TURNS))
    assert found == pytest.approx([2.5, 2, -4, 1, -5])


def test_with_lambda_zero_the_last_token_of_a_turn_is_compared_with_the_value_of_the_next() -> None:
    """Returns 4, 3, 2 with no discount: each turn's own reward is 1, 1, 2."""
    found = through_turns([4, 4, 3, 3, 2], [0.5, 1, 3, -2, 7], [ROOT, 0, 1], gae_lambda=0.0)
    # V' - V; 1 + 3 - 1; V' - V; 1 + 7 - -2; 2 - 7
    assert found == [0.5, 3.0, -5.0, 10.0, -5.0]


def test_turns_have_a_discount_of_their_own() -> None:
    """Rewards 1, 1, 2 at a discount of 0.5 between turns: the returns are 1 + 0.5 · 2 = 2 and 1 + 0.5 · 2 = 2.

    Tokens have one of 0.25, which does not apply between turns.
    """
    settings = {"turn_discount": 0.5, "discount": 0.25}
    returns, values = [2, 2, 2, 2, 2], [0.5, 1, 3, -2, 7]
    found = through_turns(returns, values, [ROOT, 0, 1], gae_lambda=0.0, **settings)
    assert found == [0.25 - 0.5, 1 + 1.5 - 1, -0.5 - 3, 1 + 3.5 + 2, -5]
    # A = return - V with λ = 1, where a token before the last of its turn has a quarter of what the last one has.
    found = through_turns(returns, values, [ROOT, 0, 1], **settings)
    second = 0.25 * 2
    first = 1 + 0.5 * second
    assert found == pytest.approx([0.25 * first - 0.5, first - 1, second - 3, 2 + 2, 2 - 7])


def test_of_branches_the_mean_counts() -> None:
    """The first turn has two continuations, whose values are 3 and 7 and whose advantages are -5 + λ δ and -5."""
    returns, values = [1, 1, 0, 0, 2], [0.5, 1, 3, -2, 7]
    assert through_turns(returns, values, [ROOT, 0, 0], gae_lambda=0.0) == [0.5, 0 + 5 - 1, -5, 2, -5]
    found = through_turns(returns, values, [ROOT, 0, 0], gae_lambda=0.5)
    last = 4 + 0.5 * ((-5 + 0.5 * 2) + -5) / 2
    assert found == pytest.approx([0.5 + 0.5 * last, last, -5 + 0.5 * 2, 2, -5])


def test_completion_whose_tokens_are_not_here_is_no_turn() -> None:
    """Whether it came before or after: its return is in those of others."""
    returns, values, completions = [3, 3, 2], [1, 2, 5], [4, 4, 9]
    turns = Turns(torch.tensor([2, 2, 7]))
    found = gae(*map(torch.tensor, (returns, values, completions)), gae_lambda=0.0, turns=turns)
    assert found.tolist() == estimates(returns, values, completions, gae_lambda=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_estimates_through_turns_are_those_of_one_long_completion_wherever_its_tokens_are(seed: int) -> None:
    """Without branches and with one discount for tokens and turns."""
    draw = random.Random(seed)
    discount, gae_lambda = draw.random(), draw.random()
    lengths = [draw.randint(1, 5) for _ in range(4)]
    rewards = [draw.gauss(0, 1) for _ in lengths]
    values = [draw.gauss(0, 1) for _ in range(sum(lengths))]
    completions = [number for number, length in enumerate(lengths) for _ in range(length)]
    ends = {sum(lengths[: number + 1]) - 1: reward for number, reward in enumerate(rewards)}
    expected = []
    for start in range(len(values)):
        total = 0.0
        for token in range(start, len(values)):
            after = values[token + 1] if token + 1 < len(values) else 0.0
            surprise = ends.get(token, 0.0) + discount * after - values[token]
            total += (discount * gae_lambda) ** (token - start) * surprise
        expected.append(total)
    returns = [sum(discount ** (later - number) * rewards[later] for later in range(number, 4)) for number in range(4)]
    turns = draw.sample(range(4), 4)
    order = [token for turn in turns for token in range(len(values)) if completions[token] == turn]
    found = through_turns(
        [returns[completions[token]] for token in order],
        [values[token] for token in order],
        [ROOT, 0, 1, 2],
        [completions[token] for token in order],
        discount,
        discount=discount,
        gae_lambda=gae_lambda,
    )
    assert found == pytest.approx([expected[token] for token in order], abs=1e-6)


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
