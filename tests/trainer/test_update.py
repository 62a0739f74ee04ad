"""One update: how groups become weighted tokens, and against which log-probs and under which loss they are trained."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import (
    PROMPT,
    branching_tree,
    gradient_of,
    group_of,
    make_batch,
    make_config,
    make_engine,
    make_group,
    make_token_batch,
)

from areal.api.errors import NonFiniteUpdate
from areal.api.io_struct import Choices
from areal.api.messages import Episode, GroupResult, Row
from areal.config.presets import resolve
from areal.config.rollout import RolloutConfig
from areal.config.training import ActorConfig, OptimizerConfig
from areal.engine.training.engine import TokenBatch, TrainingEngine, learning_rate
from areal.store.reader import StoreReader
from areal.store.records import StepRecord
from areal.store.writer import StoreWriter
from areal.trainer.batch import minibatches, rows_of_groups, select, useful_tokens
from areal.trainer.learners import policy_update
from areal.trainer.update import PolicyUpdate
from areal.trajectory.tensors import rows_of

pytestmark = pytest.mark.slow

DEFAULT = resolve(ActorConfig()).algorithm


def whole(groups: list[GroupResult], **settings: object) -> TokenBatch:
    return make_token_batch(groups, ActorConfig(**settings))  # type: ignore[arg-type]


def first_advantages(batch: TokenBatch) -> list[float]:
    """One for each sequence."""
    counts = [len(span.asked) for span in batch.spans]
    return [float(part[0]) for part in batch.fields["advantages"].split(counts)]


def test_advantage_is_the_return_minus_the_mean_of_its_group() -> None:
    batch = whole([make_group(7, [1, 0, 0, 0]), make_group(7, [1, 1]), make_group(3, [5, 7, 9])])
    assert first_advantages(batch) == pytest.approx([0.75, -0.25, -0.25, -0.25, 0, 0, -2, 0, 2])


def test_every_token_of_a_completion_has_its_advantage_and_temperature() -> None:
    group = make_group(0, [1, 0])
    group.episodes[1].rows[0].temperatures[:] = 0.5
    batch = whole([group])
    count = len(batch.spans[0].asked)
    assert set(batch.fields["advantages"][:count].tolist()) == {0.5}
    assert set(batch.fields["advantages"][count:].tolist()) == {-0.5}
    assert set(batch.temperatures[count:].tolist()) == {0.5}


def tensor_dict(rewards: list[float], **fields: object) -> dict[str, object]:
    """What a workflow returns: rows of a prompt token and three sampled ones."""
    count = len(rewards)
    return {
        "input_ids": torch.arange(4).repeat(count, 1),
        "loss_mask": torch.tensor([[0, 1, 1, 1]]).repeat(count, 1),
        "logprobs": torch.zeros(count, 4),
        "versions": torch.tensor([[-1, 0, 0, 0]]).repeat(count, 1),
        "rewards": torch.tensor(rewards),
        **fields,
    }


def group_of_dicts(*dicts: dict[str, object]) -> GroupResult:
    episodes = [rows_of(each, "workflow") for each in dicts]
    return GroupResult(0, [Episode(rows, sum(row.reward for row in rows)) for rows in episodes], [], {})


def test_returns_of_a_workflow_give_each_token_its_own_advantage() -> None:
    first = tensor_dict([1.0], returns=torch.tensor([[0.0, 3.0, 2.0, 1.0]]))
    batch = whole([group_of_dicts(first, tensor_dict([0.0]))])
    # The mean over the two completions of their mean returns, 2 and 0, is 1.
    assert batch.fields["advantages"].tolist() == [2.0, 1.0, 0.0, -1.0, -1.0, -1.0]


def test_rows_are_compared_within_the_group_ids_of_their_workflow() -> None:
    """Two roles in each episode, rewarded on different scales."""
    roles = torch.tensor([7, 9])
    group = group_of_dicts(tensor_dict([1.0, 50.0], group_id=roles), tensor_dict([0.0, 70.0], group_id=roles))
    assert first_advantages(whole([group])) == [0.5, -10.0, -0.5, 10.0]
    other = group_of_dicts(tensor_dict([4.0, 8.0], group_id=roles), tensor_dict([2.0]))
    assert first_advantages(whole([group, other]))[4:] == [0.0, 0.0, 0.0]  # of another task, each alone in its group
    parts = minibatches(whole([group, other]), 2, "seed", DEFAULT)
    assert [len({span.group for span in part.spans}) for part in parts] == [1, 1]  # a task stays whole


@pytest.mark.parametrize("loss_norm", ["token", "completion"])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_minibatches_partition_the_batch_by_whole_groups_and_each_weighs_one(count: int, loss_norm: str) -> None:
    groups = make_batch(groups=5)
    batch = whole(groups, loss_norm=loss_norm)
    parts = minibatches(batch, count, "seed", replace(DEFAULT, loss_norm=loss_norm))
    assert len(parts) == min(count, 5)
    homes = [{span.group for span in part.spans} for part in parts]
    assert sorted(group for home in homes for group in home) == [0, 1, 2, 3, 4]
    taken = sorted(id(span.ids) for part in parts for span in part.spans)
    assert taken == sorted(id(span.ids) for span in batch.spans)
    for part in parts:
        assert float(part.fields["weights"].sum()) == pytest.approx(1)
        assert len(part.fields["behaviour"]) == sum(len(span.asked) for span in part.spans)


def test_minibatches_differ_between_seeds_and_are_the_same_for_one() -> None:
    batch = whole(make_batch(groups=8))

    def homes(seed: str) -> list[set[int]]:
        return [{span.group for span in part.spans} for part in minibatches(batch, 2, seed, DEFAULT)]

    assert homes("1-0") == homes("1-0")
    assert len({str(homes(f"1-{version}")) for version in range(8)}) > 1


@pytest.mark.parametrize("adv_norm", ["none", "group", "batch"])
def test_advantages_are_those_of_the_whole_batch_in_every_minibatch(adv_norm: str) -> None:
    batch = whole(make_batch(groups=6), adv_norm=adv_norm)
    for part in minibatches(batch, 3, "seed", DEFAULT):
        known = dict(zip((id(span.ids) for span in batch.spans), first_advantages(batch), strict=True))
        assert [known[id(span.ids)] for span in part.spans] == first_advantages(part)


def test_groups_without_a_difference_are_left_out_and_the_gradient_stays() -> None:
    useful, useless = make_group(0, [1, 0, 0]), make_group(1, [1, 1, 1])
    batch = whole([useful, useless])
    assert [span.group for span in select(batch, useful_tokens(batch)).spans] == [0, 0, 0]
    # A tiny advantage keeps the useless group in; what it adds is as tiny.
    nearly = make_group(1, [1, 1, 1 + 1e-9])
    nearly.episodes[2].rows[0].returns *= 1 + 1e-6
    torch.testing.assert_close(gradient_of([useful, useless]), gradient_of([useful, nearly]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss_norm", ["token", "completion"])
@pytest.mark.parametrize("adv_norm", ["none", "group", "batch"])
def test_individual_and_concat_rows_of_a_tree_give_one_gradient(loss_norm: str, adv_norm: str) -> None:
    tree = branching_tree()
    individual, concat = group_of(tree, "individual"), group_of(tree, "concat")
    assert (len(individual.episodes[0].rows), len(concat.episodes[0].rows)) == (3, 2)
    settings = {"loss_norm": loss_norm, "adv_norm": adv_norm}
    torch.testing.assert_close(
        gradient_of([individual], **settings), gradient_of([concat], **settings), atol=1e-6, rtol=0
    )


def test_the_order_of_groups_and_episodes_does_not_matter() -> None:
    groups = make_batch(groups=3)
    turned = [replace(group, episodes=group.episodes[::-1]) for group in groups[::-1]]
    torch.testing.assert_close(gradient_of(groups), gradient_of(turned), atol=1e-6, rtol=0)


def test_rows_are_numbered_by_completion_through_the_batch() -> None:
    tree = branching_tree()
    rows = rows_of_groups([group_of(tree, "concat"), make_group(1, [1.0])])
    numbers = [np.unique(each.row.completion_index[each.row.loss_mask] + each.first_completion) for each in rows]
    assert sorted(np.concatenate(numbers).tolist()) == [0, 1, 2, 3, 4, 5]


def update(groups: list[GroupResult], engine: TrainingEngine, **settings: object) -> dict[str, float]:
    return PolicyUpdate(engine, ActorConfig(**settings), None, seed=1).step(groups).figures  # type: ignore[arg-type]


def on_policy(groups: list[GroupResult]) -> list[GroupResult]:
    """The same tokens, with the log-probs that the untrained engine gives them."""
    batch = whole(groups)
    parts = make_engine().logprobs(batch).split([len(span.asked) for span in batch.spans])
    for each, values in zip(rows_of_groups(groups), parts, strict=True):
        each.row.logprobs[each.row.loss_mask] = values.numpy()
    return groups


def test_rewarded_tokens_become_likelier_and_the_version_goes_up() -> None:
    engine, groups = make_engine(), make_batch()
    batch = whole(groups)
    advantages = batch.fields["advantages"]
    before = engine.logprobs(batch)
    figures = update(groups, engine)
    assert float(((engine.logprobs(batch) - before) * advantages).sum()) > 0
    assert engine.version == 1
    assert figures["trained_tokens"] == int((advantages != 0).sum())


def test_recomputed_log_probs_are_those_of_the_weights_after_the_last_step() -> None:
    engine, groups = make_engine(), make_batch()
    update(groups, engine, recompute_logprob=True)
    fresh = make_engine()
    with torch.no_grad():
        fresh.flat.copy_(engine.flat)
    batch = whole(groups)
    assert torch.equal(engine.logprobs(batch), fresh.logprobs(batch))


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
    itself = PolicyUpdate(make_engine(gradient_clipping=0), settings, make_engine(), seed=1).step(useless).figures
    assert itself["kl"] == pytest.approx(0, abs=1e-6)
    assert itself["grad_norm"] == pytest.approx(0, abs=1e-5)
    engine = make_engine(gradient_clipping=0, warmup_steps=0, lr=1e-3)
    away = PolicyUpdate(engine, settings, make_engine(seed=2), seed=1)
    penalties = [away.step(useless).figures["kl"] for _ in range(5)]
    assert penalties[0] > 0.1
    assert penalties == sorted(penalties, reverse=True)


def test_the_difference_to_the_sampler_is_reported_for_tokens_of_the_present_version_only() -> None:
    groups = on_policy(make_batch())
    rows = [each.row for each in rows_of_groups(groups)]
    rows[0].logprobs[rows[0].loss_mask] += np.float32(0.125)
    assert update(groups, make_engine())["max_logprob_difference"] == pytest.approx(0.125, abs=1e-4)
    rows[0].versions[rows[0].loss_mask] = -5
    assert update(groups, make_engine())["max_logprob_difference"] < 1e-4


def test_the_difference_to_the_sampler_is_reported_where_log_probs_are_recomputed_too() -> None:
    groups = on_policy(make_batch())
    rows = [each.row for each in rows_of_groups(groups)]
    rows[0].logprobs[rows[0].loss_mask] += np.float32(0.125)
    figures = update(groups, make_engine(), recompute_logprob=True)
    assert figures["max_logprob_difference"] == pytest.approx(0.125, abs=1e-4)
    assert figures["recomputed"] == 1


def test_nothing_compared_is_not_a_difference_of_zero() -> None:
    stale = on_policy(make_batch())
    for each in rows_of_groups(stale):
        each.row.versions[each.row.loss_mask] = -5
    unreported = [make_group(0, [1, 0, 0], reported=False)]
    for groups in (stale, unreported, [make_group(0, [1, 1])]):
        figures = update(groups, make_engine())
        assert figures["recomputed"] == 0
        assert not {"max_logprob_difference", "mean_logprob_difference"} & figures.keys()


def test_bounded_bad_tokens_are_counted() -> None:
    groups = on_policy([make_group(0, [1, 0])])
    bad = groups[0].episodes[1].rows[0]
    bad.logprobs[bad.loss_mask] -= np.float32(np.log(66))
    share = float(bad.loss_mask.sum() / sum(each.row.loss_mask.sum() for each in rows_of_groups(groups)))
    bounded = update(groups, make_engine())
    assert bounded["dual_clip_ratio"] == pytest.approx(share)
    free = update(groups, make_engine(), dual_clip=None)
    assert free["dual_clip_ratio"] == 0
    assert free["grad_norm"] > 10 * bounded["grad_norm"]


@pytest.mark.parametrize("staleness", [0, 2])
def test_recomputed_log_probs_imply_the_decoupled_loss_where_samples_may_be_stale(
    tmp_path: Path, staleness: int
) -> None:
    config = make_config(tmp_path, rollout=RolloutConfig(max_head_offpolicyness=staleness))
    config.actor.recompute_logprob = True
    engine = make_engine(gradient_clipping=0)
    policy_update(config, engine, None).step(make_batch())
    expected = gradient_of(make_batch(), recompute_logprob=True, use_decoupled_loss=staleness > 0)
    torch.testing.assert_close(engine.flat_grad, expected, atol=1e-6, rtol=0)


def test_auto_trusts_the_sampler_until_its_numbers_are_seen_to_differ() -> None:
    def recomputed(shift: float) -> torch.Tensor:
        """The gradient of the second step, whose samples are off-policy, after a first one that differs by `shift`."""
        engine = make_engine(gradient_clipping=0, lr=1e-9)
        auto = PolicyUpdate(engine, ActorConfig(recompute_logprob="auto"), None, seed=1)
        first = on_policy(make_batch())
        for each in rows_of_groups(first):
            each.row.logprobs[each.row.loss_mask] += np.float32(shift)
        assert auto.step(first).figures["mean_logprob_difference"] == pytest.approx(shift, abs=1e-5)
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


@pytest.mark.parametrize("minibatches", [1, 2])
def test_learning_rate_goes_by_version_through_steps_without_signal(minibatches: int) -> None:
    useless = [make_group(number, [1, 1]) for number in range(4)]
    engine = make_engine(lr=1.0, warmup_steps=0, lr_scheduler="cosine")
    rates = [update(groups, engine, ppo_n_minibatches=minibatches)["lr"] for groups in (useless, useless, make_batch())]
    places = [[step * minibatches + number for number in range(minibatches)] for step in range(3)]
    expected = [
        sum(learning_rate(OptimizerConfig(lr=1.0, warmup_steps=0, lr_scheduler="cosine"), place, 20) for place in each)
        for each in places
    ]
    assert rates == pytest.approx([each / minibatches for each in expected])
    assert engine.state()["steps"] == 3 * minibatches


def test_masked_completions_that_were_cut_off_do_not_train_but_count_for_the_mean() -> None:
    group = make_group(0, [1, 0, 0, 0])
    cut, *others = [episode.rows[0] for episode in group.episodes]
    cut.truncated = True
    full, masked = whole([group]), whole([group], mask_truncated=True)
    assert len(full.spans) == 4
    assert [span.ids.tolist() for span in masked.spans] == [row.input_ids.tolist() for row in others]
    assert first_advantages(masked) == [-0.25] * 3
    assert float(masked.fields["weights"].sum()) == pytest.approx(1)


def test_only_the_completion_that_was_cut_off_is_masked_in_a_conversation() -> None:
    tree = branching_tree()
    tree.completions[0].stop_reason = "length"
    for style in ("individual", "concat"):
        group = group_of(tree, style)
        assert group.episodes[0].truncated
        batch = whole([group], mask_truncated=True)
        trained = sum(len(span.asked) for span in batch.spans)
        assert trained == sum(episode.trained_tokens for episode in group.episodes) - len(
            tree.completions[0].output_ids
        )


def test_a_batch_of_masked_completions_only_is_a_step_without_signal() -> None:
    groups, engine = make_batch(), make_engine()
    for each in rows_of_groups(groups):
        each.row.truncated = True
    before = engine.flat.clone()
    figures = update(groups, engine, mask_truncated=True, ppo_n_minibatches=2)
    assert torch.equal(engine.flat, before)
    assert (engine.version, figures["loss"]) == (1, 0)


def spoilt_batch() -> list[GroupResult]:
    """A log-prob that is not a number, in the last of four groups."""
    groups = [make_group(number, [1, 0, 0]) for number in range(4)]
    row = groups[-1].episodes[0].rows[0]
    row.logprobs[row.loss_mask] = np.nan
    return groups


def test_update_that_is_not_finite_stops_with_its_batch_saved_and_nothing_changed(tmp_path: Path) -> None:
    engine = make_engine()
    update(make_batch(), engine)
    weights, state = engine.flat.clone(), (engine.state(), engine.moments())
    groups = spoilt_batch()
    with pytest.raises(NonFiniteUpdate) as caught:
        PolicyUpdate(engine, ActorConfig(), None, seed=1, directory=tmp_path).step(groups)
    file = tmp_path / "nonfinite-step-000002.npz"
    assert str(caught.value).startswith("step 2: the loss and the gradient norm must be finite, got nan and ")
    assert str(caught.value).endswith(
        f"the weights were not changed; its batch is saved in {file}; actor.on_nonfinite=skip leaves such updates out"
    )
    assert torch.equal(engine.flat, weights)
    assert engine.state() == state[0]
    torch.testing.assert_close(vars(engine.moments()), vars(state[1]), atol=0, rtol=0)
    with np.load(file) as saved:
        rows = [each.row for each in rows_of_groups(groups)]
        assert saved["input_ids"].tolist() == np.concatenate([row.input_ids for row in rows]).tolist()
        assert saved["lengths"].tolist() == [len(row.input_ids) for row in rows]
        places = np.concatenate([np.flatnonzero(row.loss_mask) for row in rows])
        assert saved["trained_positions"].tolist() == places.tolist()
        assert len(saved["behaviour"]) == len(saved["advantages"]) == len(places)
        assert np.isnan(saved["behaviour"]).any()


def test_a_batch_that_cannot_be_saved_does_not_hide_why_the_run_stops(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteUpdate, match=r"step 1: the loss .* its batch could not be saved \(.*No such file"):
        PolicyUpdate(make_engine(), ActorConfig(), None, seed=1, directory=tmp_path / "gone").step(spoilt_batch())


def test_skipped_update_leaves_weights_and_optimizer_alone_and_is_counted(tmp_path: Path) -> None:
    engine = make_engine()
    weights, moments = engine.flat.clone(), engine.moments()
    update_ = PolicyUpdate(engine, ActorConfig(on_nonfinite="skip"), None, seed=1, directory=tmp_path)
    figures = update_.step(spoilt_batch()).figures
    assert (figures["skipped_updates"], engine.version) == (1, 1)
    assert all(np.isfinite(value) for value in figures.values())
    assert torch.equal(engine.flat, weights)
    torch.testing.assert_close(vars(engine.moments()), vars(moments), atol=0, rtol=0)
    assert update_.step(make_batch()).figures["skipped_updates"] == 0
    assert not torch.equal(engine.flat, weights)


def test_only_the_spoilt_minibatch_is_skipped() -> None:
    engine = make_engine()
    before = engine.flat.clone()
    figures = update(spoilt_batch(), engine, on_nonfinite="skip", ppo_n_minibatches=4)
    assert figures["skipped_updates"] == 1
    assert bool(engine.flat.isfinite().all())
    assert not torch.equal(engine.flat, before)


def test_a_batch_that_teaches_nothing_leaves_the_weights_alone() -> None:
    engine = make_engine()
    before = engine.flat.clone()
    figures = update([make_group(0, [1, 1]), make_group(1, [0, 0])], engine, ppo_n_minibatches=2)
    assert torch.equal(engine.flat, before)
    assert engine.version == 1
    assert figures["loss"] == 0


def limited(row: Row, sizes: Sequence[int]) -> Row:
    """Its tokens were drawn from so many each, the lowest ids among them."""
    tokens = row.input_ids[row.loss_mask]
    sets = [np.unique([*range(size - 1), int(token)]) for size, token in zip(sizes, tokens, strict=True)]
    counts, ids = np.array([len(each) for each in sets], np.int32), np.concatenate(sets).astype(np.int32)
    begin = int(row.loss_mask.argmax())
    return replace(row, choices=[Choices(begin, begin + len(tokens), sizes=counts, ids=ids)])


def test_tokens_without_a_choice_leave_the_loss_and_its_normaliser() -> None:
    group = make_group(0, [1, 0])
    episode = group.episodes[0]
    count = int(episode.rows[0].loss_mask.sum())
    forced = replace(episode, rows=[limited(episode.rows[0], [1] + [40] * (count - 1))])
    batch = whole([replace(group, episodes=[forced, group.episodes[1]])])
    rest = len(batch.temperatures) - (count - 1)
    assert len(batch.spans[0].asked) == count - 1
    assert batch.fields["weights"].tolist() == pytest.approx([1 / (count - 1 + rest)] * (count - 1 + rest))
    assert first_advantages(batch) == [0.5, -0.5], "the completion counts all the same"
    greedy = replace(episode, rows=[replace(episode.rows[0], choices=[Choices(PROMPT, PROMPT + count, greedy=True)])])
    alone = whole([replace(group, episodes=[greedy, group.episodes[1]])])
    assert (len(alone.spans), first_advantages(alone)) == (1, [-0.5])
    nothing = update([replace(group, episodes=[greedy, greedy])], make_engine())
    assert nothing.get("trained_tokens", 0) == 0


def test_what_was_drawn_from_is_taken_through_minibatches_and_styles_of_export() -> None:
    tree = branching_tree()
    for node in tree.completions:
        row = make_group(0, [1]).episodes[0].rows[0]
        row = replace(row, input_ids=node.output_ids, loss_mask=np.ones(len(node.output_ids), np.bool_))
        (node.choices,) = limited(row, [5 + place % 3 for place in range(len(node.output_ids))]).choices
    gradients = [gradient_of([group_of(tree, style)]) for style in ("individual", "concat")]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
    for node in tree.completions:
        node.choices = None
    assert (gradient_of([group_of(tree, "concat")]) - gradients[0]).norm() > 0.1 * gradients[0].norm()


def test_a_stored_batch_leads_to_the_same_weights(tmp_path: Path) -> None:
    groups = make_batch()
    for group in groups:
        for episode in group.episodes:
            (row,) = episode.rows
            episode.rows = [limited(row, [7] * int(row.loss_mask.sum()))]
    with StoreWriter(tmp_path) as store:
        for group in groups:
            store.ready(group)
        store.step(StepRecord(1, 1, "digest", [group.task_id for group in groups], {}, {}))
    with StoreReader(tmp_path) as reader:
        again = reader.batch(1)
    assert again is not None
    flats = []
    for batch in (groups, again):
        engine = make_engine()
        update(batch, engine)
        flats.append(engine.flat.detach().clone())
    assert torch.equal(*flats)
