"""What an update computed for every trained token comes back, row by row: log-probs of the trainer, and advantages."""

from typing import Any

import numpy as np
import pytest
import torch
from plain_forward import plain_logprobs
from small_runs import branching_tree, group_of, make_batch, make_engine, make_group

from areal.api.messages import GroupResult, Row, TrainedRow
from areal.config.training import ActorConfig
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.packing import Span
from areal.trainer.batch import rows_of_groups
from areal.trainer.update import PolicyUpdate

pytestmark = pytest.mark.slow


def trained(engine: TrainingEngine, groups: list[GroupResult], **settings: Any) -> list[tuple[Row, TrainedRow]]:
    result = PolicyUpdate(engine, ActorConfig(**settings), None, seed=1).step(groups)
    rows = [row for group in groups for episode in group.episodes for row in episode.rows]
    return list(zip(rows, result.rows, strict=True))


def expected_logprobs(engine: TrainingEngine, row: Row) -> torch.Tensor:
    """Under the present weights, by a pass of its own."""
    (temperature,) = set(row.temperatures[row.loss_mask].tolist())
    return plain_logprobs(engine, Span(row.input_ids, np.flatnonzero(row.loss_mask), 0), temperature)


def assert_logprobs(found: TrainedRow, engine: TrainingEngine, row: Row) -> None:
    assert found.logprobs.dtype == found.advantages.dtype == np.float32
    assert len(found.logprobs) == len(found.advantages) == row.loss_mask.sum()
    torch.testing.assert_close(torch.from_numpy(found.logprobs), expected_logprobs(engine, row), atol=1e-5, rtol=0)


def various_groups(style: str) -> list[GroupResult]:
    """A tree with branches beside plain episodes, at several temperatures, each with an advantage."""
    groups = [group_of(branching_tree(), style), *(make_group(number, [1, 0, 0]) for number in range(1, 5))]
    for number, each in enumerate(rows_of_groups(groups)):
        each.row.temperatures[each.row.loss_mask] = 0.5 + 0.25 * (number % 3)
    return groups


def weights_by_sequence(engine: TrainingEngine) -> dict[int, torch.Tensor]:
    """Filled while it trains: the weights that each sequence's ids, by identity, are trained with."""
    seen: dict[int, torch.Tensor] = {}
    train_batch = engine.train_batch

    def watched(batch: Any, loss: Any, place: int | None = None, **options: Any) -> Any:
        seen.update(dict.fromkeys((id(span.ids) for span in batch.spans), engine.flat.detach().clone()))
        return train_batch(batch, loss, place, **options)

    engine.train_batch = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("style", ["individual", "concat"])
@pytest.mark.parametrize("budget", [16384, 40])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_log_probs_are_those_of_the_pass_that_trained_the_token(style: str, budget: int, minibatches: int) -> None:
    engine, judge, groups = make_engine(warmup_steps=0, lr=0.1), make_engine(), various_groups(style)
    engine.max_tokens_per_mb = budget
    weights = weights_by_sequence(engine)
    for row, found in trained(engine, groups, ppo_n_minibatches=minibatches):
        with torch.no_grad():
            judge.flat.copy_(weights[id(row.input_ids)])
        assert_logprobs(found, judge, row)
    assert len({float(each.sum()) for each in weights.values()}) == minibatches


@pytest.mark.parametrize("settings", [{"recompute_logprob": True}, {"use_decoupled_loss": True}])
def test_log_probs_that_were_computed_beforehand_are_those_of_the_weights_before_the_step(
    settings: dict[str, bool],
) -> None:
    engine = make_engine(warmup_steps=0, lr=0.1)
    for row, found in trained(engine, various_groups("concat"), ppo_n_minibatches=3, **settings):
        assert_logprobs(found, make_engine(), row)


def test_advantages_come_back_in_the_order_of_the_rows() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0], [5.0, 7.0], [1.0, 1.0, 4.0]]
    groups = [make_group(number, each) for number, each in enumerate(rewards)]
    found = trained(make_engine(), groups, ppo_n_minibatches=3)
    means = [np.mean(each) for each in rewards for _ in each]
    for (row, tokens), mean in zip(found, means, strict=True):
        assert tokens.advantages.tolist() == pytest.approx([row.reward - mean] * int(row.loss_mask.sum()))


def test_sequences_that_teach_nothing_have_their_advantages_and_no_log_probs() -> None:
    engine, groups = make_engine(), [make_group(0, [1, 1]), make_group(1, [1, 0]), make_group(2, [0, 0])]
    found = trained(engine, groups)
    for _, tokens in [*found[:2], *found[4:]]:
        assert np.isnan(tokens.logprobs).all()
        assert not tokens.advantages.any()
    for row, tokens in found[2:4]:
        assert_logprobs(tokens, make_engine(), row)
    (row, tokens), *_ = trained(make_engine(), [make_group(0, [1, 1])])
    assert len(tokens.logprobs) == row.loss_mask.sum()


def test_masked_completions_have_neither_and_do_not_move_the_others() -> None:
    group = group_of(branching_tree(), "concat")
    row = group.episodes[0].rows[0]
    row.truncated_completions = [0]
    cut = (row.completion_index == 0)[row.loss_mask]
    assert 0 < cut.sum() < len(cut)
    (row, tokens), *others = trained(make_engine(), [group, *make_batch()], mask_truncated=True)
    assert np.isnan(tokens.logprobs).tolist() == np.isnan(tokens.advantages).tolist() == cut.tolist()
    expected = expected_logprobs(make_engine(), row).numpy()
    np.testing.assert_allclose(tokens.logprobs[~cut], expected[~cut], atol=1e-5)
    for row, tokens in others:
        if tokens.advantages.any():
            assert_logprobs(tokens, make_engine(), row)


def test_a_skipped_update_has_no_log_probs() -> None:
    groups = [make_group(number, [1, 0, 0]) for number in range(4)]
    spoilt = groups[2].episodes[0].rows[0]
    spoilt.logprobs[spoilt.loss_mask] = np.nan
    found = trained(make_engine(lr=1e-9), groups, on_nonfinite="skip", ppo_n_minibatches=4)
    without = [number for number, (_, tokens) in enumerate(found) if np.isnan(tokens.logprobs).any()]
    assert without == [6, 7, 8]
    assert all(tokens.advantages.all() for _, tokens in found)
