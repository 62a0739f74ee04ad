"""Log-probs by a head have the value and the gradient of their definition, however they are computed."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal.engine.training import head
from areal.engine.training.head import Picks, Temperatures, head_logprobs, logits_logprobs, token_logprobs
from areal.engine.training.token_sets import DrawnFrom, TokenSets

ROWS, HIDDEN, VOCABULARY = 5, 4, 7
ASKED = [(0, 3), (0, 3), (0, 1), (2, 6), (3, 0), (3, 6), (4, 2)]
"""Row and token: of one row nothing is asked, of another the same token twice."""
PICKS = Picks.of(np.array([row for row, _ in ASKED]), np.array([token for _, token in ASKED]))
EACH = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.5, 1.0, 0.9], dtype=torch.float64)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=draw, dtype=torch.float64)
    matrix = torch.randn(VOCABULARY, HIDDEN, generator=draw, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), matrix.to(dtype).requires_grad_()


def by_definition(hidden: Tensor, matrix: Tensor, temperatures: Temperatures) -> Tensor:
    scaled = (hidden @ matrix.t())[PICKS.rows] / torch.as_tensor(temperatures, dtype=torch.float64).reshape(-1, 1)
    return scaled.log_softmax(1).gather(1, PICKS.targets[:, None]).squeeze(1)


def with_gradients(function: Any, *arguments: Any) -> list[Tensor]:
    hidden, matrix = inputs()
    found = function(hidden, matrix, *arguments)
    given = torch.linspace(-1, 2, len(ASKED), dtype=torch.float64)
    return [found.detach(), *torch.autograd.grad((found * given).sum(), (hidden, matrix))]


@pytest.mark.parametrize("held", [1, 2, 100], ids=["a row at a time", "two rows", "all rows"])
@pytest.mark.parametrize("temperatures", [1.0, 0.6, EACH], ids=["1", "one", "several"])
def test_values_and_gradients_are_those_of_the_definition(
    temperatures: Temperatures, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "HEAD_ELEMENTS", held * VOCABULARY)
    found = with_gradients(lambda *each: head_logprobs(*each, PICKS, temperatures))
    for ours, theirs in zip(found, with_gradients(by_definition, temperatures), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_the_gradient_of_a_logit_is_one_at_its_token_less_the_softmax_by_the_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    picks = Picks.of(np.array([0, 0]), np.array([1, 2]))
    (logits_logprobs(logits, picks, 0.5) * torch.tensor([3.0, 5.0])).sum().backward()
    softmax = (logits.detach() / 0.5).exp() / (logits.detach() / 0.5).exp().sum()
    expected = (3 * (torch.tensor([0.0, 1, 0]) - softmax) + 5 * (torch.tensor([0.0, 0, 1]) - softmax)) / 0.5
    torch.testing.assert_close(logits.grad, expected, atol=1e-12, rtol=0)


def test_gradients_agree_with_differences_of_values() -> None:
    hidden, matrix = inputs()
    head_logprobs(hidden, matrix, PICKS, EACH).sum().backward()
    draw = torch.Generator().manual_seed(1)
    for varied in (hidden, matrix):
        assert varied.grad is not None
        direction = torch.randn(varied.shape, generator=draw, dtype=torch.float64)
        slopes = []
        for step in (1e-6, -1e-6):
            moved = [each.detach() + step * direction if each is varied else each.detach() for each in (hidden, matrix)]
            slopes.append(float(head_logprobs(moved[0], moved[1], PICKS, EACH).sum()))
        assert float((varied.grad * direction).sum()) == pytest.approx((slopes[0] - slopes[1]) / 2e-6, rel=1e-6)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, VOCABULARY)
    before = logits.clone()
    token_logprobs(logits, torch.tensor([1, 2, 3]), 0.5)
    assert torch.equal(logits, before)


def test_large_logits_do_not_overflow() -> None:
    found = token_logprobs(torch.tensor([[1e4, 0.0], [-1e4, 0.0]]), torch.tensor([0, 0]))
    assert found.tolist() == [0.0, -1e4]


@pytest.mark.parametrize("held", [2, 100])
def test_in_bfloat16_products_are_and_nothing_else(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "HEAD_ELEMENTS", held * VOCABULARY)
    hidden, matrix = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = head_logprobs(hidden, matrix, PICKS)
    found.sum().backward()
    rounded = [each.detach().bfloat16().requires_grad_() for each in (hidden, matrix)]
    logits = (rounded[0] @ rounded[1].t()).float()
    expected = logits.log_softmax(1)[PICKS.rows, PICKS.targets]
    expected.sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for ours, theirs in ((hidden.grad, rounded[0].grad), (matrix.grad, rounded[1].grad)):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs.float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("held", "kept"), [(100, ROWS * VOCABULARY + ROWS), (2, 0)])
def test_of_logits_no_more_than_one_softmax_is_kept(held: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing where they are computed in pieces."""
    monkeypatch.setattr(head, "HEAD_ELEMENTS", held * VOCABULARY)
    hidden, matrix = inputs()
    sizes = []

    def note(tensor: Tensor) -> Tensor:
        if tensor is not hidden and tensor is not matrix:
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        head_logprobs(hidden, matrix, PICKS)
        with torch.no_grad():
            head_logprobs(hidden, matrix, PICKS)
    assert sum(sizes) == kept


def test_a_softmax_that_was_used_up_is_not_used_again() -> None:
    hidden, matrix = inputs()
    found = head_logprobs(hidden, matrix, PICKS).sum()
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


@pytest.mark.parametrize("held", [1, 3, 100], ids=["a row at a time", "three rows", "all rows"])
@pytest.mark.parametrize("temperatures", [1.0, EACH], ids=["1", "several"])
def test_log_probs_are_taken_over_what_was_drawn_from(
    temperatures: Temperatures, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "HEAD_ELEMENTS", held * VOCABULARY)
    ids, sizes = torch.tensor([1, 3, 5, 2, 6, 0]), torch.tensor([0, 3, 2, 1])
    # Everything; 1, 3 and 5; all but 2 and 6; 0 alone.
    sets = TokenSets(ids, sizes.cumsum(0) - sizes, sizes, torch.tensor([True, False, True, False]))
    drawn = DrawnFrom(sets, torch.tensor([1, 0, 1, 0, 3, 0, 0]))

    def by_mask(hidden: Tensor, matrix: Tensor) -> Tensor:
        scaled = (hidden @ matrix.t())[PICKS.rows] / torch.as_tensor(temperatures, dtype=torch.float64).reshape(-1, 1)
        outside = torch.zeros(len(ASKED), VOCABULARY, dtype=torch.bool)
        outside[[0, 2]] = torch.tensor([token not in (1, 3, 5) for token in range(VOCABULARY)])
        outside[4, 1:] = True
        return scaled.masked_fill(outside, -torch.inf).log_softmax(1).gather(1, PICKS.targets[:, None]).squeeze(1)

    found = with_gradients(lambda *each: head_logprobs(*each, PICKS, temperatures, drawn))
    for ours, theirs in zip(found, with_gradients(by_mask), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    assert found[0][4] == 0


def test_a_set_may_be_what_is_left_out() -> None:
    logits = torch.arange(12, dtype=torch.float32).reshape(2, 6)
    sets = TokenSets(torch.tensor([4, 5, 1]), torch.tensor([0, 2]), torch.tensor([2, 1]), torch.tensor([True, False]))
    DrawnFrom(sets, torch.tensor([0, 1])).limit(logits)
    assert logits[0].tolist() == [0, 1, 2, 3, -torch.inf, -torch.inf]
    assert logits[1].tolist() == [-torch.inf, 7, *[-torch.inf] * 4]


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropies_are_those_of_what_was_drawn_from(
    monkeypatch: pytest.MonkeyPatch, pieces: bool, temperature: float
) -> None:
    if pieces:
        monkeypatch.setattr(head, "HEAD_ELEMENTS", 2 * 11)
    drawn = torch.Generator().manual_seed(3)
    hidden, matrix = torch.randn(5, 4, generator=drawn), torch.randn(11, 4, generator=drawn)
    rows, targets = np.array([0, 0, 1, 3, 4, 4]), np.array([2, 3, 1, 0, 10, 9])
    found = torch.empty(6)
    head.head_logprobs(hidden, matrix, head.Picks.of(rows, targets), temperature, entropies=found)
    logprobs = (hidden.double() @ matrix.double().t() / temperature).log_softmax(1)
    torch.testing.assert_close(found.double(), -(logprobs.exp() * logprobs).sum(1)[rows], atol=1e-6, rtol=1e-6)


def test_entropy_counts_what_may_not_be_drawn_for_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf], [5.0, -torch.inf, -torch.inf, -torch.inf]])
    found = torch.empty(2)
    head.token_logprobs(logits, torch.tensor([0, 0]), entropies=found)
    share = 1 / (1 + math.e)
    assert found.tolist() == pytest.approx(
        [-share * math.log(share) - (1 - share) * math.log(1 - share), 0.0], abs=1e-6
    )
