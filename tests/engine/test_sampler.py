"""Tokens come out as often as their probabilities say, and never from outside what a request allows."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.engine.inference import sampler
from areal.engine.inference.sampler import Sampled, SamplingParams, sample, uniforms

LOGITS = torch.tensor([1.0, 0.0, -0.5, 2.0, -3.0, 0.5])
DRAWS = 20_000
CHI_SQUARE_LIMIT = 36.0
"""Five degrees of freedom: exceeded by chance once in a million, and the seeds are fixed."""


def draw(
    logits: Tensor, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, draws: int = DRAWS
) -> Sampled:
    params = SamplingParams.of_rows([(temperature, top_p, top_k, seed) for seed in range(draws)])
    return sample(logits.expand(draws, -1), params, [0] * draws)


def chi_square(tokens: list[int], probs: Tensor) -> float:
    observed = torch.bincount(torch.tensor(tokens), minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    return float(((observed - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_probabilities(temperature: float) -> None:
    tokens, _, _ = draw(LOGITS, temperature=temperature)
    assert chi_square(tokens, (LOGITS / temperature).softmax(0)) < CHI_SQUARE_LIMIT


def test_the_successive_tokens_of_one_seed_follow_the_probabilities_too() -> None:
    params = SamplingParams.of_rows([(1.0, 1.0, 0, 7)] * DRAWS)
    tokens, _, _ = sample(LOGITS.expand(DRAWS, -1), params, range(DRAWS))
    assert chi_square(tokens, LOGITS.softmax(0)) < CHI_SQUARE_LIMIT


def test_top_k_draws_among_the_likeliest_in_proportion() -> None:
    tokens, _, _ = draw(LOGITS, top_k=3)
    kept = torch.where(torch.tensor([True, False, False, True, False, True]), LOGITS, -torch.inf)
    assert chi_square(tokens, kept.softmax(0)) < CHI_SQUARE_LIMIT


def test_top_p_draws_from_the_smallest_set_that_holds_it() -> None:
    ranked = LOGITS.softmax(0).sort(descending=True).values.cumsum(0)
    tokens, _, _ = draw(LOGITS, top_p=float(ranked[1]) + 1e-3)
    kept = torch.where(torch.tensor([True, False, False, True, False, True]), LOGITS, -torch.inf)
    assert chi_square(tokens, kept.softmax(0)) < CHI_SQUARE_LIMIT
    assert set(draw(LOGITS, top_p=1e-9)[0]) == {3}


def test_top_p_and_top_k_limit_together() -> None:
    assert set(draw(LOGITS, top_k=2, top_p=0.99)[0]) == {0, 3}


def test_greedy_takes_the_likeliest() -> None:
    assert set(draw(LOGITS, temperature=0.0, draws=50)[0]) == {3}


@pytest.mark.parametrize(("limits", "left"), [({}, None), ({"top_k": 2}, [0, 3]), ({"top_p": 0.5}, [3])])
def test_logprobs_are_those_of_what_was_drawn_from(limits: dict[str, Any], left: list[int] | None) -> None:
    tokens, logprobs, sets = draw(LOGITS, temperature=0.7, draws=100, **limits)
    outside = torch.ones(6, dtype=torch.bool).index_fill_(0, torch.tensor(left or range(6)), False)
    expected = (LOGITS / 0.7).masked_fill(outside, -torch.inf).log_softmax(0)
    assert logprobs == pytest.approx(expected[tokens].tolist(), abs=1e-6)
    assert [sets[row].tolist() for row in sets] == ([] if left is None else [left] * 100)


def test_greedy_tokens_have_the_logprob_of_temperature_1_and_no_set() -> None:
    tokens, logprobs, sets = draw(LOGITS, temperature=0.0, draws=3, top_k=2)
    assert logprobs == pytest.approx(LOGITS.log_softmax(0)[tokens].tolist(), abs=1e-6)
    assert sets == {}


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=6, max_size=6),
    st.sampled_from([1.0, 0.99, 0.9, 0.5, 1e-3]),
    st.integers(0, 7),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sets(st.integers(0, 5), max_size=5),
    st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_a_set_is_the_likeliest_that_hold_top_p_of_what_is_allowed(
    values: list[float], top_p: float, top_k: int, temperature: float, bans: set[int], seed: int
) -> None:
    logits, banned = torch.tensor([values]), torch.zeros(1, 6, dtype=torch.bool)
    banned[0, list(bans)] = True
    params = SamplingParams.of_rows([(temperature, top_p, top_k, seed)])
    (token,), (logprob,), sets = sample(logits, params, [0], banned)
    allowed = (logits[0] / temperature).masked_fill(banned[0], -torch.inf)
    left = sets[0].tolist() if top_p < 1 or top_k else [each for each in range(6) if each not in bans]
    assert token in left
    assert left == sorted(set(left) - bans)
    assert logprob == pytest.approx(float(allowed[left].log_softmax(0)[left.index(token)]), abs=1e-5)
    if top_p == 1 and not top_k:
        assert sets == {}
        return
    probs = allowed.softmax(0).double()
    others = [each for each in range(6) if each not in left]
    assert max(probs[others], default=0.0) <= min(probs[left])
    assert len(left) <= (top_k or 6)
    assert probs[left].sum() - min(probs[left]) < top_p + 1e-6  # without its last it does not hold top_p
    if len(left) < min(top_k or 6, 6 - len(bans)):
        assert probs[left].sum() >= top_p - 1e-6


def test_banned_tokens_are_not_drawn_and_logprobs_are_those_of_what_is_left() -> None:
    banned = torch.zeros(DRAWS, 6, dtype=torch.bool)
    banned[:, 3] = True
    params = SamplingParams.of_rows([(1.0, 1.0, 0, seed) for seed in range(DRAWS)])
    tokens, logprobs, _ = sample(LOGITS.expand(DRAWS, -1), params, [0] * DRAWS, banned)
    left = torch.where(banned[0], -torch.inf, LOGITS)
    assert chi_square(tokens, left.softmax(0)) < CHI_SQUARE_LIMIT
    assert logprobs == pytest.approx(left.log_softmax(0)[tokens].tolist(), abs=1e-6)
    greedy = SamplingParams.of_rows([(0.0, 1.0, 0, 0)])
    assert sample(LOGITS[None], greedy, [0], banned[:1])[0] == [0]


def test_a_ban_on_all_the_probability_still_gives_an_allowed_token() -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0, 0.0]])
    banned = torch.tensor([[True, False, False, True]])
    drawn = {sample(logits, SamplingParams.of_rows([(1.0, 1.0, 0, seed)]), [0], banned)[0][0] for seed in range(50)}
    assert drawn == {1, 2}


@pytest.mark.parametrize("limits", [(1.0, 0), (0.9, 4)])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_no_token_of_probability_zero_is_drawn_at_any_point_of_the_range(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[float, int], u: float
) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, counts: torch.full((len(seeds),), u))
    inf = torch.inf
    logits = torch.tensor(
        [[-inf, -inf, 1.0, -inf, 0.5, -500.0, 0.1, -inf], [-inf, 0.0, -inf, 0.0, -inf, 0.0, -inf, -inf]]
    )
    tokens, logprobs, _ = sample(logits, SamplingParams.of_rows([(1.0, *limits, 1), (1.0, *limits, 2)]), [0, 0])
    assert all(logits.softmax(1)[row, token] > 0 for row, token in enumerate(tokens))
    assert all(np.isfinite(logprobs))


def test_rounding_at_the_end_of_the_range_neither_leaves_the_allowed_set_nor_shrinks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, counts: torch.full((len(seeds),), 1 - 2**-24))
    logits = 4 * torch.randn(500, 300, generator=torch.Generator().manual_seed(0)).sort(dim=1, descending=True).values
    free, limited = (1.0, 1.0, 0, 0), (1.0, 1.0, 2, 0)
    alone, _, _ = sample(logits, SamplingParams.of_rows([free] * 500), [0] * 500)
    both = SamplingParams.of_rows([free] * 500 + [limited] * 500)
    together, _, _ = sample(torch.cat([logits, logits]), both, [0] * 1000)
    assert together[:500] == alone
    assert set(together[500:]) == {1}


def test_a_row_draws_the_same_whatever_shares_its_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 1000, generator=generator) * 3
    rows = [(1.0 + row % 3 / 2, 1.0, 0, row) for row in range(64)]
    counts = list(range(64))
    alone = [sample(logits[row : row + 1], SamplingParams.of_rows([rows[row]]), [row])[0][0] for row in range(64)]
    assert sample(logits, SamplingParams.of_rows(rows), counts)[0] == alone
    limited = SamplingParams.of_rows([*rows[:-1], (1.0, 0.5, 5, 63)])
    assert sample(logits, limited, counts)[0][:-1] == alone[:-1]


def test_the_numbers_of_a_seed_are_uniform_and_reproducible() -> None:
    seeds = np.array([5, 2**64 - 1], dtype=np.uint64)
    first, again = uniforms(seeds, [3, 3]), uniforms(seeds, [3, 3])
    assert torch.equal(first, again)
    many = uniforms(np.full(DRAWS, 5, dtype=np.uint64), range(DRAWS))
    assert float(many.min()) >= 0
    assert float(many.max()) < 1
    bins = torch.bincount((many * 6).long(), minlength=6)
    assert chi_square((many * 6).long().tolist(), torch.full((6,), 1 / 6)) < CHI_SQUARE_LIMIT, bins


def large_vocabulary(rows: int = 64, size: int = 8192) -> Tensor:
    """Peaked and flat rows, and some with ties."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, size, generator=generator) * torch.linspace(0.01, 6.0, rows)[:, None]
    logits[::5] = logits[::5].round()
    return logits


def test_limits_of_a_large_vocabulary_are_those_of_sorting_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = large_vocabulary()
    limits = [
        (1.0, 1.0, 0),
        (1.0, 0.9, 0),
        (0.7, 1.0, 40),
        (1.0, 0.3, 600),
        (1.0, 1.0, 1),
        (1.5, 0.999, 0),
        (1.0, 0.5, 7),
    ]
    rows = [(*limits[row % len(limits)], row) for row in range(len(logits))]
    probs = (logits / torch.tensor([row[0] for row in rows])[:, None]).softmax(-1)
    params = SamplingParams.of_rows(rows)
    fast = sampler._limit(probs, params)
    monkeypatch.setattr(sampler, "CANDIDATES", probs.shape[1])
    expected = torch.where(((params.top_p < 1) | (params.top_k > 0))[:, None], sampler._limit(probs, params), probs)
    assert torch.equal(fast, expected)


def test_a_large_vocabulary_is_drawn_from_as_its_cumulative_sum_says() -> None:
    probs = large_vocabulary(rows=512).softmax(-1)
    probs[:, ::3] = 0.0
    u = torch.linspace(0, 1 - 2**-24, len(probs))
    tokens = sampler._invert(probs, u)
    assert (probs.gather(1, tokens[:, None]) > 0).all()
    exact = probs.double().cumsum(-1)
    before = (exact.gather(1, tokens[:, None]) - probs.double().gather(1, tokens[:, None])).squeeze(1)
    after = exact.gather(1, tokens[:, None]).squeeze(1)
    point = u.double() * exact[:, -1]
    assert ((before - 1e-6 <= point) & (point <= after + 1e-6)).all()
