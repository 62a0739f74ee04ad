"""Groups become tokens whose advantages go by group and whose weights do not depend on how they are laid out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import byte_tokenizer, gradient_of, make_batch, make_group

from areal.api.io_struct import ModelResponse
from areal.api.messages import Episode, GroupResult
from areal.config.training import ActorConfig
from areal.engine.training.engine import TokenBatch
from areal.trainer.update import minibatches, rows_of_groups, token_batch, without_zero_advantages
from areal.trajectory import Renderer, Tree, assign_reward, export
from areal.trajectory.answer import read_answer


def whole(groups: list[GroupResult], **settings: object) -> TokenBatch:
    return token_batch(rows_of_groups(groups), ActorConfig(**settings))  # type: ignore[arg-type]


def first_advantages(batch: TokenBatch) -> list[float]:
    """One for each sequence."""
    counts = [len(span.asked) for span in batch.spans]
    return [float(part[0]) for part in batch.fields["advantages"].split(counts)]


def test_advantage_is_the_return_beside_the_mean_of_the_own_group() -> None:
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


@pytest.mark.parametrize("loss_norm", ["token", "completion"])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_minibatches_partition_the_batch_by_whole_groups_and_each_weighs_one(count: int, loss_norm: str) -> None:
    groups = make_batch(groups=5)
    batch = whole(groups, loss_norm=loss_norm)
    parts = minibatches(batch, count, "seed")
    assert len(parts) == min(count, 5)
    homes = [{span.group for span in part.spans} for part in parts]
    assert sorted(group for home in homes for group in home) == [0, 1, 2, 3, 4]
    taken = sorted(id(span.ids) for part in parts for span in part.spans)
    assert taken == sorted(id(span.ids) for span in batch.spans)
    for part in parts:
        assert float(part.fields["weights"].sum()) == pytest.approx(1)
        assert len(part.fields["logprobs"]) == sum(len(span.asked) for span in part.spans)


def test_minibatches_are_dealt_anew_for_each_seed_and_alike_for_the_same() -> None:
    batch = whole(make_batch(groups=8))

    def homes(seed: str) -> list[set[int]]:
        return [{span.group for span in part.spans} for part in minibatches(batch, 2, seed)]

    assert homes("1-0") == homes("1-0")
    assert len({str(homes(f"1-{version}")) for version in range(8)}) > 1


@pytest.mark.parametrize("adv_norm", ["none", "group", "batch"])
def test_advantages_are_those_of_the_whole_batch_in_every_minibatch(adv_norm: str) -> None:
    batch = whole(make_batch(groups=6), adv_norm=adv_norm)
    for part in minibatches(batch, 3, "seed"):
        known = dict(zip((id(span.ids) for span in batch.spans), first_advantages(batch), strict=True))
        assert [known[id(span.ids)] for span in part.spans] == first_advantages(part)


def test_groups_without_a_difference_are_left_out_and_the_gradient_stays() -> None:
    useful, useless = make_group(0, [1, 0, 0]), make_group(1, [1, 1, 1])
    assert [span.group for span in without_zero_advantages(whole([useful, useless])).spans] == [0, 0, 0]
    # A tiny advantage keeps the useless group in; what it adds is as tiny.
    nearly = make_group(1, [1, 1, 1 + 1e-9])
    nearly.episodes[2].rows[0].returns *= 1 + 1e-6
    torch.testing.assert_close(gradient_of([useful, useless]), gradient_of([useful, nearly]), atol=1e-6, rtol=0)


def branching_tree() -> Tree:
    """Two tries, the second with two answers: three turns on two paths."""
    tokenizer = byte_tokenizer()
    tree = Tree(Renderer(tokenizer))

    def say(messages: list[dict[str, str]], answer: str) -> None:
        prompt = tree.prompt(messages)
        output = [*tree.renderer.encode(answer), tokenizer.eos_token_id]
        count = len(tree.completions)
        response = ModelResponse(prompt.ids, output, [-5.0 - count / 7] * len(output), [0] * len(output), "stop")
        read = read_answer(tree.renderer, response, completion_id="", stop_ids=[tokenizer.eos_token_id])
        tree.add(prompt, response, read, completion_id=f"id-{count}", temperature=1.0)

    ask = [{"role": "user", "content": "Sort 21"}]
    again = [*ask, {"role": "assistant", "content": "21"}, {"role": "user", "content": "Wrong"}]
    say(ask, "21")
    say(again, "12")
    say(again, "11 or so")
    assign_reward(tree, {"id-1": 1.0, "id-2": -0.5}, "agent")
    return tree


def group_of(tree: Tree, style: str) -> GroupResult:
    rows = export(tree, style, turn_discount=0.9)  # type: ignore[arg-type]
    other = make_group(0, [0.0, 1.0]).episodes
    return GroupResult(0, [Episode(rows, tree.reward), *other], [], {})


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
