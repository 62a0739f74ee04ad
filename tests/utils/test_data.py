"""Joining tensor dicts: what is padded, with what, and what is refused."""

import pytest
import torch

from areal.utils.data import concat_padded_tensors


def test_sequences_are_padded_to_the_longest_and_scalars_joined() -> None:
    joined = concat_padded_tensors(
        [
            {
                "input_ids": torch.tensor([[1, 2, 3]]),
                "versions": torch.tensor([[-1, 0, 0]]),
                "rewards": torch.tensor([1.0]),
            },
            {
                "input_ids": torch.tensor([[4], [5]]),
                "versions": torch.tensor([[2], [3]]),
                "rewards": torch.tensor([0.5, 2]),
            },
        ]
    )
    assert joined["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 0, 0]]
    assert joined["versions"].tolist() == [[-1, 0, 0], [2, -1, -1], [3, -1, -1]]
    assert joined["rewards"].tolist() == [1.0, 0.5, 2.0]


def test_a_missing_attention_mask_is_made_so_that_padding_can_be_told() -> None:
    joined = concat_padded_tensors(
        [
            {"input_ids": torch.tensor([[7]])},
            {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 0]], dtype=torch.bool)},
        ]
    )
    assert joined["attention_mask"].tolist() == [[True, False], [True, False]]


def test_the_pad_value_reaches_tokens_and_never_masks() -> None:
    row = {"loss_mask": torch.tensor([[1]]), "completion_index": torch.tensor([[0]])}
    joined = concat_padded_tensors(
        [
            row | {"input_ids": torch.tensor([[7]])},
            {name: torch.cat([tensor] * 2, 1) for name, tensor in row.items()} | {"input_ids": torch.tensor([[1, 2]])},
        ],
        pad_value=99,
    )
    assert joined["input_ids"].tolist() == [[7, 99], [1, 2]]
    assert joined["attention_mask"].tolist() == [[True, False], [True, True]]
    assert joined["loss_mask"].tolist() == [[1, 0], [1, 1]]
    assert joined["completion_index"].tolist() == [[0, -1], [0, 0]]


def test_further_dimensions_are_kept() -> None:
    joined = concat_padded_tensors([{"x": torch.ones(1, 2, 3)}, {"x": torch.ones(2, 4, 3)}])
    assert joined["x"].shape == (3, 4, 3)
    assert joined["x"][0, 2:].sum() == 0


def test_scalars_without_a_batch_dimension_count_as_one_row() -> None:
    joined = concat_padded_tensors([{"reward": torch.tensor(1.0)}, {"reward": torch.tensor([2.0])}])
    assert joined["reward"].tolist() == [1.0, 2.0]


def test_different_keys_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"the same keys, got \['a'\] and \['a', 'b'\]"):
        concat_padded_tensors([{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}])


def test_nothing_to_join_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one dict"):
        concat_padded_tensors([])


def test_images_are_joined_row_by_row() -> None:
    one = {"input_ids": torch.tensor([[1, 2]]), "images": [[b"red", b"blue"]]}
    two = {"input_ids": torch.tensor([[3], [4]]), "images": [[], [b"red"]]}
    assert concat_padded_tensors([one, two])["images"] == [[b"red", b"blue"], [], [b"red"]]
