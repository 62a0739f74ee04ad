"""One update: against which log-probs, under which loss, and what is reported of it."""

import numpy as np
import pytest
import torch
from small_runs import gradient_of, make_batch, make_engine, make_group

from areal.api.messages import GroupResult
from areal.config.training import ActorConfig
from areal.engine.training.engine import TrainingEngine
from areal.trainer.update import PolicyUpdate, rows_of_groups, token_batch


def update(groups: list[GroupResult], engine: TrainingEngine, **settings: object) -> dict[str, float]:
    return PolicyUpdate(engine, ActorConfig(**settings), None, seed=1).step(groups)  # type: ignore[arg-type]


def on_policy(groups: list[GroupResult]) -> list[GroupResult]:
    """The same tokens, with the log-probs that the untrained engine gives them."""
    batch = token_batch(rows_of_groups(groups), ActorConfig())
    parts = make_engine().logprobs(batch).split([len(span.asked) for span in batch.spans])
    for each, values in zip(rows_of_groups(groups), parts, strict=True):
        each.row.logprobs[each.row.loss_mask] = values.numpy()
    return groups


def test_rewarded_tokens_become_likelier_and_the_version_goes_up() -> None:
    engine, groups = make_engine(), make_batch()
    batch = token_batch(rows_of_groups(groups), ActorConfig())
    advantages = batch.fields["advantages"]
    before = engine.logprobs(batch)
    figures = update(groups, engine)
    assert float(((engine.logprobs(batch) - before) * advantages).sum()) > 0
    assert engine.version == 1
    assert figures["trained_tokens"] == int((advantages != 0).sum())


def test_rows_without_reported_logprobs_are_trained_as_if_sampled_just_now() -> None:
    reported = on_policy([make_group(0, [1, 0, 0]), make_group(1, [0, 1, 1])])
    unreported = [make_group(0, [1, 0, 0], reported=False), make_group(1, [0, 1, 1], reported=False)]
    torch.testing.assert_close(gradient_of(unreported), gradient_of(reported), atol=1e-6, rtol=0)


def test_only_the_rows_that_lack_logprobs_are_recomputed() -> None:
    mixed = [make_group(0, [1, 0, 0]), make_group(1, [0, 1, 1], reported=False)]
    expected = [make_group(0, [1, 0, 0]), *on_policy([make_group(1, [0, 1, 1])])]
    torch.testing.assert_close(gradient_of(mixed), gradient_of(expected), atol=1e-6, rtol=0)


def test_recompute_logprob_puts_the_trainers_in_place_of_the_samplers() -> None:
    off_policy = make_batch()
    torch.testing.assert_close(
        gradient_of(off_policy, recompute_logprob=True), gradient_of(on_policy(make_batch())), atol=1e-6, rtol=0
    )


def test_decoupled_loss_of_samples_from_the_present_policy_is_the_plain_one() -> None:
    groups = on_policy(make_batch())
    torch.testing.assert_close(gradient_of(groups, use_decoupled_loss=True), gradient_of(groups), atol=1e-6, rtol=0)


def test_decoupled_loss_weighs_by_the_behaviour_ratio_and_drops_what_exceeds_the_cap() -> None:
    def shifted(by: float) -> list[GroupResult]:
        groups = on_policy(make_batch())
        for each in rows_of_groups(groups):
            each.row.logprobs[each.row.loss_mask] -= np.float32(by)
        return groups

    plain = gradient_of(shifted(0), use_decoupled_loss=True)
    twice = gradient_of(shifted(np.log(2)), use_decoupled_loss=True)
    torch.testing.assert_close(twice, 2 * plain, atol=1e-5, rtol=0)
    assert float(gradient_of(shifted(np.log(2)), use_decoupled_loss=True, behave_imp_weight_cap=1.9).norm()) == 0


def test_kl_is_nothing_against_itself_and_pulls_back_towards_another_model() -> None:
    settings = ActorConfig(kl_ctl=1.0)
    useless = [make_group(0, [1, 1, 1])]  # no advantage: only the penalty moves anything
    itself = PolicyUpdate(make_engine(gradient_clipping=0), settings, make_engine(), seed=1).step(useless)
    assert itself["kl"] == pytest.approx(0, abs=1e-6)
    assert itself["grad_norm"] == pytest.approx(0, abs=1e-5)
    engine = make_engine(gradient_clipping=0, warmup_steps=0, lr=1e-3)
    away = PolicyUpdate(engine, settings, make_engine(seed=2), seed=1)
    penalties = [away.step(useless)["kl"] for _ in range(5)]
    assert penalties[0] > 0.1
    assert penalties == sorted(penalties, reverse=True)


def test_the_difference_to_the_sampler_is_reported_for_tokens_of_the_present_version_only() -> None:
    groups = on_policy(make_batch())
    rows = [each.row for each in rows_of_groups(groups)]
    rows[0].logprobs[rows[0].loss_mask] += np.float32(0.125)
    assert update(groups, make_engine())["max_logprob_difference"] == pytest.approx(0.125, abs=1e-4)
    rows[0].versions[rows[0].loss_mask] = -5
    assert update(groups, make_engine())["max_logprob_difference"] < 1e-4


def test_auto_trusts_the_sampler_until_its_numbers_are_seen_to_differ() -> None:
    def recomputed(shift: float) -> torch.Tensor:
        """The gradient of the second step, whose samples are off-policy, after a first one that differs by `shift`."""
        engine = make_engine(gradient_clipping=0, lr=1e-9)
        auto = PolicyUpdate(engine, ActorConfig(recompute_logprob="auto"), None, seed=1)
        first = on_policy(make_batch())
        for each in rows_of_groups(first):
            each.row.logprobs[each.row.loss_mask] += np.float32(shift)
        assert auto.step(first)["mean_logprob_difference"] == pytest.approx(shift, abs=1e-5)
        auto.step(make_batch())
        return engine.flat_grad.clone()

    trusted, distrusted = recomputed(0.0), recomputed(0.01)
    torch.testing.assert_close(trusted, gradient_of(make_batch()), atol=1e-4, rtol=0)
    torch.testing.assert_close(distrusted, gradient_of(on_policy(make_batch())), atol=1e-4, rtol=0)
    assert not torch.allclose(trusted, distrusted, atol=1e-3)


def test_a_resumed_run_remembers_what_it_saw_of_the_sampler() -> None:
    engine = make_engine(gradient_clipping=0)
    PolicyUpdate(engine, ActorConfig(), None, seed=1, seen_difference=0.01).step(make_batch())
    torch.testing.assert_close(engine.flat_grad, gradient_of(on_policy(make_batch())), atol=1e-6, rtol=0)


def test_a_later_minibatch_sees_changed_weights_and_is_not_compared() -> None:
    groups = on_policy(make_batch(groups=8))
    figures = update(groups, make_engine(warmup_steps=0, lr=0.1), ppo_n_minibatches=4)
    assert figures["max_logprob_difference"] < 1e-4
    assert figures["trained_tokens"] <= sum(int(each.row.loss_mask.sum()) for each in rows_of_groups(groups))


def test_a_batch_that_teaches_nothing_leaves_the_weights_alone() -> None:
    engine = make_engine()
    before = engine.flat.clone()
    figures = update([make_group(0, [1, 1]), make_group(1, [0, 0])], engine, ppo_n_minibatches=2)
    assert torch.equal(engine.flat, before)
    assert engine.version == 1
    assert figures["loss"] == 0
