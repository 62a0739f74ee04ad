"""The tensor dict: what may be in it, and every mistake named at once."""

from typing import Any

import numpy as np
import pytest
import torch

from areal.api.errors import AgentFailed
from areal.api.io_struct import ModelResponse
from areal.api.messages import Episode, GroupResult
from areal.trajectory.tensors import (
    UNLIMITED,
    RowLimits,
    check_row,
    row_of_response,
    rows_of,
    tensors_of_group,
    tensors_of_response,
    tensors_of_rows,
)

RESPONSE = ModelResponse([5, 6, 7], [1, 2, 5, 9, 2], [-0.5] * 5, [3] * 5, "stop")


def tensor_dict(**changes: Any) -> dict[str, Any]:
    fields = {
        "input_ids": torch.tensor([[5, 6, 7, 1, 2, 5, 9, 2]]),
        "attention_mask": torch.ones(1, 8, dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * 3 + [1] * 5]),
        "logprobs": torch.tensor([[0.0] * 3 + [-0.5] * 5]),
        "versions": torch.tensor([[-1] * 3 + [3] * 5]),
        "rewards": torch.tensor([0.5]),
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def short_form(**changes: Any) -> dict[str, Any]:
    fields = {
        "input_ids": torch.tensor([5, 6, 7]),
        "output_ids": torch.tensor([1, 2, 5, 9, 2]),
        "reward": torch.tensor(0.5),
    }
    return fields | changes


def refusal(tensors: Any, temperature: float | None = 1.0, limits: RowLimits = UNLIMITED) -> str:
    with pytest.raises(AgentFailed) as caught:
        rows_of(tensors, "Asking", temperature, limits)
    return str(caught.value)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_row_made_without_tensors_is_the_row_that_they_become(reason: Any) -> None:
    response = ModelResponse([5, 6, 7], [1, 9], [-0.1, -2.25], [3, 4], reason)
    (read,) = rows_of(tensors_of_response(response, 0.1, 0.7), "Asking", 0.7)
    made = row_of_response(response, 0.1, 0.7)
    for name, value in vars(read).items():
        same = vars(made)[name]
        assert type(same) is type(value)
        if isinstance(value, np.ndarray):
            assert (same.dtype, same.tolist()) == (value.dtype, value.tolist()), name
        else:
            assert same == value, name


def test_a_row_made_without_tensors_is_held_to_the_same_limits() -> None:
    row = row_of_response(RESPONSE, 0.5, 1.0)
    check_row(row, "Asking", RowLimits(10, 8))
    for limits in (RowLimits(9, None), RowLimits(None, 7)):
        with pytest.raises(AgentFailed) as caught:
            check_row(row, "Asking", limits)
        assert str(caught.value) == refusal(tensors_of_response(RESPONSE, 0.5, 1.0), limits=limits)
    row.logprobs[4] = np.nan
    with pytest.raises(AgentFailed, match="logprobs must be finite in float32"):
        check_row(row, "Asking")


def test_what_is_built_is_read_as_it_was() -> None:
    (row,) = rows_of(tensors_of_response(RESPONSE, 0.5, 0.25), "Asking")
    (again,) = rows_of(tensors_of_rows([row]), "Asking")
    for each in (row, again):
        assert each.input_ids.tolist() == [5, 6, 7, 1, 2, 5, 9, 2]
        assert each.loss_mask.tolist() == [False] * 3 + [True] * 5
        assert each.logprobs.tolist() == [0.0] * 3 + [-0.5] * 5
        assert each.versions.tolist() == [-1] * 3 + [3] * 5
        assert each.temperatures.tolist() == [1.0] * 3 + [0.25] * 5
        assert each.returns.tolist() == [0.0] * 3 + [0.5] * 5
        assert each.completion_index.tolist() == [-1] * 3 + [0] * 5
        assert (each.reward, each.truncated, each.recompute_logprobs) == (0.5, False, False)


def test_group_has_a_row_for_every_row_of_its_episodes_and_the_tasks_number() -> None:
    rows = [*rows_of(tensor_dict(), "Asking"), *rows_of(short_form(output_ids=[1], reward=1.0), "Asking")]
    tensors = tensors_of_group(GroupResult(7, [Episode([row], row.reward) for row in rows], [], {}))
    assert tensors["input_ids"].shape == tensors["attention_mask"].shape == (2, 8)
    assert tensors["attention_mask"].sum(1).tolist() == [8, 4]
    assert (tensors["rewards"].tolist(), tensors["group_id"].tolist()) == ([0.5, 1.0], [7, 7])
    assert "images" not in tensors
    rows[0].images = [b"red"]
    assert tensors_of_group(GroupResult(7, [Episode(rows, 1.5)], [], {}))["images"] == [[b"red"], []]


def test_group_ids_and_returns_of_a_workflow_stay_as_they_are() -> None:
    returns = torch.tensor([[0.0] * 3 + [5.0, 4.0, 3.0, 2.0, 1.0]])
    (row,) = rows_of(tensor_dict(group_id=torch.tensor([9]), returns=returns), "Asking")
    assert (row.group_id, row.returns.tolist()) == (9, returns[0].tolist())
    (other,) = rows_of(tensor_dict(), "Asking")
    assert other.group_id is None
    tensors = tensors_of_group(GroupResult(7, [Episode([row, other], 1.0)], [], {}))
    assert tensors["group_id"].tolist() == [9, 7]


def test_padded_batch_becomes_rows_of_their_own_length() -> None:
    padded = {
        name: torch.cat([value, torch.zeros(1, 2, dtype=value.dtype)], 1) if value.dim() == 2 else value
        for name, value in tensor_dict().items()
    }
    rows = rows_of({name: torch.cat([value, value]) for name, value in padded.items()}, "Asking")
    assert [len(row.input_ids) for row in rows] == [8, 8]
    assert [set(row.completion_index[row.loss_mask].tolist()) for row in rows] == [{0}, {1}]
    assert sum(row.reward for row in rows) == 1.0


def test_what_pads_the_ids_does_not_matter() -> None:
    padding = {
        "input_ids": torch.tensor([[5, 6, 7, 1, 2, 5, 9, -100]]),
        "loss_mask": torch.tensor([[0] * 3 + [1] * 4 + [0]]),
    }
    (row,) = rows_of(tensor_dict(**padding, attention_mask=torch.tensor([[1] * 7 + [0]])), "Asking")
    assert row.input_ids.tolist() == [5, 6, 7, 1, 2, 5, 9]


def test_numpy_and_lists_are_read_like_tensors() -> None:
    (row,) = rows_of({name: value.numpy().tolist() for name, value in tensor_dict().items()}, "Asking")
    (short,) = rows_of({name: value.numpy() for name, value in short_form().items()}, "Asking")
    assert row.input_ids.tolist() == short.input_ids.tolist()
    assert (row.reward, short.reward) == (0.5, 0.5)


def test_short_form_leaves_log_probs_and_versions_to_others() -> None:
    (row,) = rows_of(short_form(), "Asking", 0.5)
    assert row.recompute_logprobs
    assert row.versions.tolist() == [-1] * 8
    assert row.temperatures.tolist() == [1.0] * 3 + [0.5] * 5
    assert np.isfinite(row.logprobs).all()


def test_every_wrong_field_is_named_at_once() -> None:
    text = refusal(
        tensor_dict(
            input_ids=torch.zeros(1, 4),
            loss_mask=None,
            logprobs=torch.full((1, 4), float("nan")),
            versions=torch.zeros(1, 9, dtype=torch.int),
            attention_mask=torch.tensor([[0, 1, 1, 1]]),
            rewards=["good"],
            score=torch.ones(1),
        )
    )
    for fault in (
        "Asking returned a wrong trajectory",
        "loss_mask is missing",
        "score is unknown",
        "input_ids must be integers",
        "logprobs must be finite",
        "versions must have shape [1, 4], got [1, 9]",
        "rewards must be numbers",
        "padding belongs on the right",
    ):
        assert fault in text
    assert "rewards is missing" not in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss_mask": torch.ones(1, 8, dtype=torch.int)}, "0 on the first token"),
        ({"loss_mask": torch.zeros(1, 8, dtype=torch.int)}, "a token to train on in every row"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])}, "loss_mask must be 0 where attention_mask is"),
        ({"logprobs": [[0.0], [0.0, 1.0]]}, "logprobs cannot be read as numbers"),
        ({"logprobs": np.full((1, 8), -1e300)}, "logprobs must be finite in float32"),
        ({"rewards": np.array([1e308])}, "rewards must be finite in float32"),
        ({"returns": np.full((1, 8), -1e39)}, "returns must be finite in float32"),
        (
            {"input_ids": torch.tensor([[5, 6, 7, 1, 2, 5, 9, -1]])},
            "input_ids must lie in 0 to 2147483647, got -1 to 9",
        ),
        ({"input_ids": torch.tensor([[2**31] * 8])}, "input_ids must lie in 0 to 2147483647"),
        ({"group_id": torch.tensor([0.5])}, "group_id must be integers"),
        ({"temperatures": torch.zeros(1, 8)}, "temperatures must be > 0 where loss_mask is 1"),
        ({"completion_index": torch.full((1, 8), -1)}, "completion_index must be >= 0 where loss_mask is 1"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], text: str) -> None:
    assert text in refusal(tensor_dict(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"reward": torch.tensor([1.0])}, "reward must have 0 dimensions, got shape [1]"),
        ({"reward": float("nan")}, "reward must be finite"),
        ({"reward": 1e308}, "reward must be finite in float32"),
        ({"output_ids": torch.tensor([1, -2])}, "output_ids must lie in 0 to 2147483647, got -2 to 1"),
        ({"output_ids": torch.tensor([], dtype=torch.int)}, "output_ids must hold a token"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.int)}, "input_ids must have 1 dimension, got shape [1, 3]"),
        ({"output_ids": torch.ones(3)}, "output_ids must be integers"),
        ({"loss_mask": torch.ones(3)}, "loss_mask is unknown next to output_ids"),
    ],
)
def test_wrong_short_form_is_refused(changes: dict[str, Any], text: str) -> None:
    assert text in refusal(short_form(**changes))


@pytest.mark.parametrize("result", [1.0, [1, 2], "text"])
def test_what_is_no_dict_is_refused_by_its_type(result: Any) -> None:
    assert f"must return a dict of tensors or None, got {type(result).__name__}" in refusal(result)


def test_temperatures_must_be_given_where_calls_differ_in_it() -> None:
    assert "temperatures is missing" in refusal(tensor_dict(), temperature=None)
    (row,) = rows_of(tensor_dict(temperatures=torch.full((1, 8), 0.25)), "Asking", None)
    assert set(row.temperatures.tolist()) == {0.25}


def test_images_become_those_of_the_rows() -> None:
    assert [row.images for row in rows_of(tensor_dict(images=[[b"red", b"blue"]]), "Asking")] == [[b"red", b"blue"]]
    assert [row.images for row in rows_of(short_form(images=[b"red"]), "Asking")] == [[b"red"]]


@pytest.mark.parametrize(
    ("form", "images", "fault"),
    [
        (tensor_dict, [[], []], "images must have a list for each of the 1 rows, got 2"),
        (tensor_dict, b"red", "images must be a list with a list of encoded bytes for each row, got bytes"),
        (tensor_dict, [b"red"], "images must hold a list for each row, got bytes"),
        (tensor_dict, [["red", 7]], "images must hold encoded bytes, got int, str"),
        (short_form, ["red"], "images must hold encoded bytes, got str"),
    ],
)
def test_wrong_images_are_named_with_what_else_is_wrong(form: Any, images: Any, fault: str) -> None:
    text = refusal(form(images=images, nonsense=torch.ones(1)))
    assert fault in text
    assert "nonsense is unknown" in text


@pytest.mark.parametrize("prompt", [[5, 6, 10], [5, 2**31 - 1, 7]])
def test_token_that_the_model_does_not_know_is_refused_with_the_remedy(prompt: list[int]) -> None:
    limits, ids = RowLimits(vocab_size=10), [*prompt, 1, 2, 5, 9, 2]
    rule = f"input_ids must lie in the model's vocabulary, 0 to 9, got {max(prompt)}; encode with the model's own"
    assert rule in refusal(tensor_dict(input_ids=torch.tensor([ids])), limits=limits)
    assert rule in refusal(short_form(input_ids=torch.tensor(prompt)), limits=limits)
    assert "output_ids must lie in the model's vocabulary" in refusal(short_form(output_ids=[9, 10]), limits=limits)


def test_row_that_is_longer_than_the_model_is_refused_with_the_remedy() -> None:
    for tensors in (tensor_dict(), short_form()):
        rows_of(tensors, "Asking", limits=RowLimits(max_positions=8))
        text = refusal(tensors, limits=RowLimits(max_positions=7))
        assert "a row must have at most 7 tokens, the model's positions, got 8; shorten the prompt" in text


def test_padding_counts_for_neither_limit() -> None:
    padded = {
        name: torch.nn.functional.pad(value, (0, 4), value=99 if name == "input_ids" else 0)
        for name, value in tensor_dict().items()
        if name != "rewards"
    }
    (row,) = rows_of({**padded, "rewards": [0.5]}, "Asking", limits=RowLimits(vocab_size=10, max_positions=8))
    assert row.input_ids.tolist() == [5, 6, 7, 1, 2, 5, 9, 2]
