"""However sequences are packed, each token attends to its own sequence and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_forward import plain_logprobs
from tiny_models import training_engine

from areal.engine.training.engine import TokenBatch
from areal.engine.training.packing import Pack, Span, pack

pytestmark = pytest.mark.slow

ENGINE = training_engine()

token_lists = st.lists(st.integers(0, 3), min_size=2, max_size=14)


@st.composite
def span_lists(draw: st.DrawFn) -> list[Span]:
    """Sequences of a few groups, which often begin alike, with some positions asked for, at times none."""
    spans = []
    for _ in range(draw(st.integers(1, 8))):
        ids = draw(st.sampled_from([[], [1] * 9, [1] * 6 + [2] * 6, [3]])) + draw(token_lists)
        asked = draw(st.sets(st.integers(1, len(ids) - 1), max_size=6))
        spans.append(Span(np.array(ids), np.array(sorted(asked), dtype=np.int64), draw(st.integers(0, 2))))
    return spans


@settings(max_examples=60, deadline=None)
@given(spans=span_lists(), budget=st.integers(1, 80), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_packed_logprobs_are_those_of_each_sequence_alone(spans: list[Span], budget: int, temperature: float) -> None:
    total = sum(len(span.asked) for span in spans)
    ENGINE.max_tokens_per_mb = budget
    packed = ENGINE.logprobs(TokenBatch(spans, torch.full((total,), temperature)))
    single = torch.cat([plain_logprobs(ENGINE, span, temperature) for span in spans])
    torch.testing.assert_close(packed, single, atol=1e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(spans=span_lists(), budget=st.integers(1, 80))
def test_passes_keep_to_the_budget_and_ask_for_every_position_once(spans: list[Span], budget: int) -> None:
    packs = list(pack(spans, budget))
    longest = max((int(span.asked[-1]) for span in spans if len(span.asked)), default=0)
    assert all(len(part.ids) <= max(budget, longest) for part in packs)
    assert all(sum(row.tokens for row in part.rows) == len(part.ids) for part in packs)
    asked = sorted(place for part in packs for place in part.order.tolist())
    assert asked == list(range(sum(len(span.asked) for span in spans)))


def seen_by_each(part: Pack) -> list[list[int]]:
    """Which tokens each token of a pass attends to."""
    seen: list[list[int]] = []
    for row in part.rows:
        causal = row.causal_mask(torch.device("cpu")).expand(row.count, 1, -1, -1)
        for member in (causal if row.mask is None else row.mask)[:, 0]:
            start = len(seen)
            seen += [(torch.nonzero(line == 0).flatten() + start).tolist() for line in member]
    return seen


@settings(max_examples=100, deadline=None)
@given(spans=span_lists(), budget=st.integers(1, 80))
def test_what_predicts_a_token_attends_to_its_prefix_and_nothing_else(spans: list[Span], budget: int) -> None:
    asked = [(span, place) for span in spans for place in span.asked.tolist()]
    for part in pack(spans, budget):
        seen = seen_by_each(part)
        assert part.sources.tolist() == sorted(set(part.sources.tolist()))
        for row, target, number in zip(
            *(each.tolist() for each in (part.picks.rows, part.picks.targets, part.order)), strict=True
        ):
            span, place = asked[number]
            prefix = seen[part.sources[row]]
            assert part.positions[prefix].tolist() == list(range(place))
            assert part.ids[prefix].tolist() == span.ids[:place].tolist()
            assert target == span.ids[place]


def group(prefix: int, tails: int, count: int) -> list[Span]:
    draw = np.random.default_rng(0)
    start = draw.integers(0, 200, prefix)
    sequences = [np.concatenate((start, [200 + i], draw.integers(0, 200, tails - 1))) for i in range(count)]
    return [Span(ids, np.arange(prefix, prefix + tails), group=0) for ids in sequences]


def test_a_shared_prompt_is_computed_once() -> None:
    (part,) = pack(group(prefix=400, tails=10, count=8), 10_000)
    assert len(part.ids) == 400 + 8 * 9


def test_long_answers_to_a_short_prompt_are_not_forced_into_one_square_mask() -> None:
    (part,) = pack(group(prefix=10, tails=1000, count=8), 100_000)
    assert [(row.count, row.size, row.mask) for row in part.rows] == [(8, 1009, None)]


def test_a_conversation_is_plainly_causal_whatever_its_turns() -> None:
    ids = np.arange(200)
    (part,) = pack([Span(ids[:end], np.arange(end - 5, end), group=0) for end in (50, 100, 100, 200)], 1000)
    assert [(row.count, row.size, row.mask) for row in part.rows] == [(1, 199, None)]


def test_sequences_of_different_groups_share_nothing() -> None:
    ids = np.arange(10)
    (part,) = pack([Span(ids, np.array([9]), group) for group in (0, 1)], 1000)
    assert len(part.ids) == 18


def test_a_batch_that_asks_for_nothing_makes_no_pass() -> None:
    assert list(pack([Span(np.arange(5), np.array([], dtype=np.int64), 0)], 10)) == []
