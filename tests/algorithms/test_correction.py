"""Behaviour weights at every level, their bounds and masks, in numbers worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from areal.algorithms.correction import bounded, correct, negative_kept, second_moment_kept
from areal.algorithms.ratio import Completions
from areal.algorithms.stages import VARIANTS
from areal.config.presets import resolve
from areal.config.training import ActorConfig

LOG2 = math.log(2)
LOG_WEIGHTS = torch.tensor([LOG2, LOG2, -LOG2, 3 * LOG2], dtype=torch.float64)
COMPLETIONS = Completions.of(torch.tensor([8, 8, 8, 3]))
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 2.0, 0.5, 8.0]),
        ("sequence", [2.0, 2.0, 2.0, 8.0]),  # 2 · 2 · 1/2
        ("geometric", [2 ** (1 / 3)] * 3 + [8.0]),
    ],
)
def test_weights_of_tokens_and_of_completions(level: str, expected: list[float]) -> None:
    found = VARIANTS["correction"][level](LOG_WEIGHTS, ADVANTAGES, COMPLETIONS)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_a_weight_stays_finite_however_far_the_policies_are_apart() -> None:
    far = torch.tensor([1e4, -1e4, 300.0, 1.0], dtype=torch.float64)
    for level in VARIANTS["correction"].values():
        assert bool(level(far, ADVANTAGES, COMPLETIONS).isfinite().all())


@pytest.mark.parametrize(
    ("low", "high", "truncate", "expected"),
    [
        (None, None, False, [2.0, 0.5, 8.0]),
        (None, 5.0, False, [2.0, 0.5, 0.0]),
        (None, 5.0, True, [2.0, 0.5, 5.0]),
        (0.6, 5.0, False, [2.0, 0.0, 0.0]),
        (0.6, 5.0, True, [2.0, 0.6, 5.0]),
        (None, 2.0, False, [2.0, 0.5, 0.0]),  # a weight at the bound is within it
    ],
)
def test_weights_beyond_a_bound_are_left_out_or_held_there(
    low: float | None, high: float | None, truncate: bool, expected: list[float]
) -> None:
    assert bounded(torch.tensor([2.0, 0.5, 8.0]), low, high, truncate=truncate).tolist() == pytest.approx(expected)


def test_the_second_moment_leaves_out_the_largest_that_a_clip_could_hold() -> None:
    log_weights = torch.tensor([1.0, -0.5, 0.5, -1.0, 2.0, 0.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    # The fourth and fifth go against their advantage. The others' squares are 1, .25, .25, .01: 1.51 / 4 = .3775, then
    # .51 / 3 = .17
    assert second_moment_kept(log_weights, advantages, 0.38).all()
    assert second_moment_kept(log_weights, advantages, 0.37).tolist() == [False, True, True, True, True, True]
    assert second_moment_kept(log_weights, advantages, 0.18).tolist() == [False, True, True, True, True, True]
    assert second_moment_kept(log_weights, advantages, 0.001).tolist() == [False, False, False, True, True, False]


def test_tokens_that_no_clip_holds_do_not_dilute_the_second_moment() -> None:
    log_weights, advantages = torch.tensor([0.3, 0.1]), torch.ones(2)
    # (.09 + .01) / 2 = .05, whatever else the batch holds: tokens against their advantage, or without one
    others = torch.tensor([-0.2, 3.0, 0.0] * 10)
    nothing = torch.tensor([1.0, 0.0, 1.0] * 10)
    kept = second_moment_kept(torch.cat((log_weights, others)), torch.cat((advantages, nothing)), 0.04)
    assert kept.tolist() == [False] + [True] * 31
    assert second_moment_kept(log_weights, advantages, 0.04).tolist() == [False, True]


def test_the_second_moment_leaves_out_no_more_than_it_takes() -> None:
    log_weights, advantages = torch.tensor([0.1, 0.3, 0.2, 0.4]), torch.ones(4)
    # (.16 + .09 + .04 + .01) / 4 = .075; without the largest .14 / 3 = .047; without the next too .05 / 2 = .025
    kept = [second_moment_kept(log_weights, advantages, most).tolist() for most in (0.08, 0.05, 0.03)]
    assert kept == [[True] * 4, [True, True, True, False], [True, False, True, False]]


def test_bad_completions_that_the_policy_has_left_are_masked() -> None:
    log_weights = torch.tensor([-0.9, -0.3, -0.9, -0.3, 0.5])
    completions = Completions.of(torch.tensor([0, 0, 1, 1, 2]))
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0])
    assert negative_kept(log_weights, advantages, completions, 0.5).tolist() == [False, False, True, True, True]
    assert negative_kept(log_weights, advantages, completions, 0.61).all()  # the mean is .6


def test_a_token_is_masked_by_a_bound_or_a_mask_and_counted_once() -> None:
    def found(**settings: Any) -> Any:
        algorithm = replace(resolve(ActorConfig()).algorithm, **settings)
        weights = LOG_WEIGHTS.exp()
        return correct(weights, LOG_WEIGHTS, ADVANTAGES, COMPLETIONS, algorithm)

    assert found().weights.tolist() == pytest.approx([2, 2, 0.5, 0])  # a cap of 5
    assert found().masked.tolist() == [False, False, False, True]
    both = found(behave_imp_weight_cap=None, second_moment=0.5, negative_mask=0.0)
    assert both.masked.tolist() == (both.weights == 0).tolist()
    held = found(correction_bound="truncate")
    assert held.weights.tolist() == pytest.approx([2, 2, 0.5, 5])
    assert not held.masked.any()
