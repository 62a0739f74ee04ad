"""Distillation against the reverse KL, by enumerating every sequence of a tiny vocabulary, in double precision."""

import itertools

import pytest
import torch
from torch import Tensor

from areal.algorithms.distillation import distillation_advantages

WORDS, LENGTH = 3, 3


def tables(seed: int) -> list[Tensor]:
    """Logits of each token, by all tokens before it."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(WORDS**place, WORDS, generator=draw, dtype=torch.float64) for place in range(LENGTH)]


def logprobs(logits: list[Tensor], sequence: tuple[int, ...]) -> Tensor:
    """Of each token of a sequence [LENGTH]."""
    found, before = [], 0
    for place, token in enumerate(sequence):
        found.append(logits[place].log_softmax(1)[before, token])
        before = before * WORDS + token
    return torch.stack(found)


SEQUENCES = list(itertools.product(range(WORDS), repeat=LENGTH))


def expected_policy_gradient(student: list[Tensor], teacher: list[Tensor], discount: float) -> list[Tensor]:
    """E[Σ A_t ∇ log student_t] over everything that the student may draw, as the loss -Σ A_t log student_t has it."""
    loss = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        own, other = logprobs(student, sequence), logprobs(teacher, sequence)
        advantages = distillation_advantages(other, own.detach(), torch.zeros(LENGTH), discount)
        loss = loss - own.detach().sum().exp() * (advantages * own).sum()
    return list(torch.autograd.grad(loss, student))


def test_undiscounted_gradient_is_that_of_the_reverse_kl_of_whole_completions() -> None:
    student, teacher = [each.requires_grad_() for each in tables(1)], tables(2)
    kl = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        own, other = logprobs(student, sequence).sum(), logprobs(teacher, sequence).sum()
        kl = kl + own.exp() * (own - other)
    for found, expected in zip(
        expected_policy_gradient(student, teacher, 1.0), torch.autograd.grad(kl, student), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-14)


def test_gradient_without_a_view_ahead_is_that_of_the_reverse_kl_of_each_token() -> None:
    student, teacher = [each.requires_grad_() for each in tables(1)], tables(2)
    kl = torch.zeros((), dtype=torch.float64)
    for place, (own, other) in enumerate(zip(student, teacher, strict=True)):
        own, other = own.log_softmax(1), other.log_softmax(1)
        for before, prefix in enumerate(itertools.product(range(WORDS), repeat=place)):
            reached = logprobs(student, prefix).sum().exp().detach() if place else 1.0
            kl = kl + reached * (own[before].exp() * (own[before] - other[before])).sum()
    for found, expected in zip(
        expected_policy_gradient(student, teacher, 0.0), torch.autograd.grad(kl, student), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_tokens_answer_for_those_that_follow_in_their_completion_only(discount: float) -> None:
    teacher, student = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.zeros(5)
    found = distillation_advantages(teacher, student, torch.tensor([7, 3, 7, 3, 7]), discount)
    g = discount
    assert found.tolist() == [1 + g * 4 + g * g * 16, 2 + g * 8, 4 + g * 16, 8, 16]
