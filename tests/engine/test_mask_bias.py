"""The gradient of the expected reward, by exact enumeration of every answer that can be drawn under a mask.

Log-probs over what was drawn from give exactly that gradient; log-probs over the whole vocabulary do not.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from drawn_rows import READER, row_of
from tiny_models import TINY, byte_tokenizer
from torch import Tensor

from areal.api.io_struct import Choices, Grammar, ModelResponse
from areal.engine.inference.grammar import GrammarCompiler, banned_tokens
from areal.engine.inference.sampler import SamplingParams, sample
from areal.engine.training.head import token_logprobs
from areal.engine.training.token_sets import DrawnFrom

VOCABULARY, LENGTH, STOP = 6, 3, 5
Prefix = tuple[int, ...]
Left = Callable[[Prefix, Tensor], list[int]]
"""What may follow a prefix, given its logits."""


class Policy:
    """Logits of its own after every prefix: a table, so that nothing but the mask ties them together."""

    def __init__(self, vocabulary: int, temperature: float) -> None:
        self.vocabulary, self.temperature = vocabulary, temperature
        self.rows: dict[Prefix, int] = {}
        generator = torch.Generator().manual_seed(3)
        self.table = (1.5 * torch.randn(300, vocabulary, generator=generator, dtype=torch.float64)).requires_grad_()

    def logits(self, prefix: Prefix) -> Tensor:
        return self.table[self.rows.setdefault(prefix, len(self.rows))]

    def answers(self, left: Left, prefix: Prefix = ()) -> Iterator[tuple[Prefix, list[list[int]], Tensor]]:
        """Every answer with its sets and its probability."""
        if len(prefix) == LENGTH or prefix[-1:] == (STOP,):
            yield prefix, [], torch.ones((), dtype=torch.float64)
            return
        logits = self.logits(prefix) / self.temperature
        allowed = left(prefix, logits.detach())
        probs = logits[allowed].softmax(0)
        for place, token in enumerate(allowed):
            for answer, sets, rest in self.answers(left, (*prefix, token)):
                yield answer, [allowed, *sets], probs[place] * rest


def reward(answer: Prefix) -> float:
    return float(np.sin(1 + sum((place + 1) * token for place, token in enumerate(answer))))


def bias(policy: Policy, left: Left, choices: Callable[[Prefix, list[list[int]]], Choices | None]) -> float:
    """How far the gradient by the trainer's log-probs is from that of the expected reward, as a share of it."""
    found = list(policy.answers(left))
    probs = torch.stack([prob for _, _, prob in found])
    assert float(probs.detach().sum()) == pytest.approx(1)
    rewards = torch.tensor([reward(answer) for answer, _, _ in found], dtype=torch.float64)
    (exact,) = torch.autograd.grad((probs * rewards).sum(), policy.table)
    estimate = torch.zeros_like(exact)
    for (answer, sets, _), prob, value in zip(found, probs.detach(), rewards, strict=True):
        tokens = list(answer)
        response = ModelResponse([0], tokens, [0.0] * len(tokens), [0] * len(tokens), "stop")
        response.choices = choices(answer, sets)
        read = READER.read([row_of(response)])
        logits = torch.stack([policy.logits(answer[:place]) for place in range(len(answer))])
        drawn = None if read is None else DrawnFrom(*read)
        logprobs = token_logprobs(logits, torch.tensor(tokens), policy.temperature, drawn)
        (gradient,) = torch.autograd.grad(prob * value * logprobs.sum(), policy.table)
        estimate += gradient
    return float((estimate - exact).norm() / exact.norm())


def recorded(answer: Prefix, sets: list[list[int]]) -> Choices:
    sizes = np.array([len(each) for each in sets], np.int32)
    return Choices(0, len(answer), sizes=sizes, ids=np.array(list(itertools.chain(*sets)), np.int32))


def sampled_sets(top_p: float, top_k: int) -> Left:
    """Those that the engine's sampler leaves."""

    def left(prefix: Prefix, logits: Tensor) -> list[int]:
        found = sample(logits.float()[None], SamplingParams.of_rows([(1.0, top_p, top_k, 0)]), [0]).sets[0]
        return [int(each) for each in found]

    return left


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("top_p", "top_k", "least"), [(0.95, 0, 0.005), (0.7, 0, 0.05), (0.5, 0, 0.1), (1.0, 2, 0.1), (0.9, 4, 0.005)]
)
def test_top_p_and_top_k(top_p: float, top_k: int, least: float, temperature: float) -> None:
    policy = Policy(VOCABULARY, temperature)
    left = sampled_sets(top_p, top_k)
    assert bias(policy, left, recorded) < 1e-12
    assert bias(policy, left, lambda *_: None) > least


def test_min_new_tokens() -> None:
    policy = Policy(VOCABULARY, 1.0)

    def left(prefix: Prefix, logits: Tensor) -> list[int]:
        banned = banned_tokens(VOCABULARY, [STOP], len(prefix), 2, None)
        return [token for token in range(VOCABULARY) if banned is None or not banned[token]]

    assert bias(policy, left, lambda answer, _: Choices(0, len(answer), stops=[STOP], min_new_tokens=2)) < 1e-12
    assert bias(policy, left, lambda *_: None) > 0.01


GRAMMAR = Grammar("lark", 'start: ("a" | "b" | "c") (("d" | "e") "f" | "g" ("h" | "i"))')


def test_grammar() -> None:
    policy, left = Policy(TINY.vocab_size, 0.8), grammar_sets
    follows = Choices(0, LENGTH, grammar_kind=GRAMMAR.kind, grammar_text=GRAMMAR.text)
    assert bias(policy, left, lambda *_: follows) < 1e-12
    assert bias(policy, left, lambda *_: None) > 0.3


def test_grammar_with_top_p() -> None:
    policy = Policy(TINY.vocab_size, 1.0)

    def left(prefix: Prefix, logits: Tensor) -> list[int]:
        banned = torch.ones(1, len(logits), dtype=torch.bool)
        banned[0, grammar_sets(prefix, logits)] = False
        found = sample(logits.float()[None], SamplingParams.of_rows([(1.0, 0.8, 0, 0)]), [0], banned).sets[0]
        return [int(each) for each in found]

    assert bias(policy, left, recorded) < 1e-12
    assert bias(policy, left, lambda *_: None) > 0.3


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), TINY.vocab_size, trusted=True)


def grammar_sets(prefix: Prefix, logits: Tensor) -> list[int]:
    state = compiler().begin_now(GRAMMAR)
    for token in prefix:
        state.advance(token)
    return [int(each) for each in np.flatnonzero(state.allowed(()))]
