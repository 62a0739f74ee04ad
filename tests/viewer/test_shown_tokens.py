"""Tokens are shown with the text and the figures that are theirs, and branches with where they part."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal.api.io_struct import Choices
from areal.api.messages import TrainedRow
from areal.viewer.tokens import (
    MOST_TOKENS,
    Fork,
    Parting,
    TokenTexts,
    completion_figures,
    forks,
    load_texts,
    token_columns,
)
from tests.viewer.viewed_runs import branching_episode, row_of, trained_of

NAMED = {"actor": {"path": "builtin:tiny-math"}}


def test_figures_stand_at_their_tokens() -> None:
    row = row_of([5, 6, 7], [8, 9], version=3)
    computed = TrainedRow(
        np.array([0.5, np.nan], np.float32), np.array([-0.5, -1.0], np.float32), np.array([0.25, np.nan], np.float32)
    )
    columns = token_columns(row, computed, TokenTexts())
    assert columns["at"] == [3, 4]
    assert columns["id"] == [5, 6, 7, 8, 9]
    assert columns["advantage"] == [0.5, None]
    assert columns["trainer"] == [-0.5, -1.0]
    assert columns["entropy"] == [0.25, None]
    assert columns["version"] == [3, 3]
    assert columns["text"] == ["5 ", "6 ", "7 ", "8 ", "9 "]


def test_tokens_say_what_they_were_drawn_from_where_that_was_limited() -> None:
    row = row_of([1, 2], [3, 4, 5])
    assert token_columns(row, None, TokenTexts())["left"] == [None] * 3
    sizes, ids = np.array([1, 2, 3], np.int32), np.array([3, 4, 9, 5, 6, 7], np.int32)
    row.choices = [Choices(2, 5, sizes=sizes, ids=ids)]
    assert token_columns(row, None, TokenTexts())["left"] == ["1 token", "2 tokens", "3 tokens"]
    row.choices = [Choices(2, 4, grammar_kind="lark", grammar_text="start: /.*/"), Choices(4, 5, greedy=True)]
    assert token_columns(row, None, TokenTexts())["left"] == ["what its grammar allows"] * 2 + [
        "the likeliest was taken"
    ]
    row.choices = [Choices(2, 5, stops=[7], min_new_tokens=2)]
    assert token_columns(row, None, TokenTexts())["left"] == ["what may come before its end"] * 2 + [None]


def test_what_was_not_trained_has_no_advantage() -> None:
    columns = token_columns(row_of([1], [2], trained=False), None, TokenTexts())
    assert columns["advantage"] == [None]
    assert columns["trained"] == [False]
    assert columns["logprob"] == [-0.25]


def test_a_long_row_is_shown_in_parts() -> None:
    row = row_of([1], list(range(MOST_TOKENS + 5)))
    first, rest = (token_columns(row, None, TokenTexts(), start) for start in (0, MOST_TOKENS))
    assert len(first["id"]) == MOST_TOKENS
    assert len(first["id"]) + len(rest["id"]) == first["total"] == len(row.input_ids)


def test_texts_come_from_the_tokenizer_that_the_config_names(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from areal.utils.hf_utils import tokenizer_directory

    tokenizer = Tokenizer.from_file(str(Path(tokenizer_directory("builtin:tiny-math")) / "tokenizer.json"))
    said = "Sort 0296 <|im_end|>\n"
    ids = tokenizer.encode(said, add_special_tokens=False).ids
    assert "".join(load_texts(tmp_path, NAMED).of(ids)) == said


def test_parts_of_a_character_are_shown_as_their_bytes() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: place for place, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode("a 😀").ids
    assert TokenTexts(tokenizer).of(ids) == ["a", " ", "⟨f0⟩", "⟨9f⟩", "⟨98⟩", "⟨80⟩"]


def test_the_copy_in_a_checkpoint_comes_first(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "tokenizer.json").write_text("damaged")
    assert load_texts(tmp_path, NAMED).known  # the one that is named, since that one cannot be read
    assert not load_texts(tmp_path, {}).known


@pytest.mark.parametrize("path", ["builtin:gone", "/no/such/model", "someone/unknown-model", "", "../../etc"])
def test_ids_stand_in_for_a_tokenizer_that_is_not_here(tmp_path: Path, path: str) -> None:
    texts = load_texts(tmp_path, {"actor": {"path": path}})
    assert not texts.known
    assert texts.of([7]) == ["7 "]


def test_branches_part_at_the_first_different_token() -> None:
    found = forks(branching_episode(), TokenTexts())
    assert set(found) == {2, 3}
    assert found[2] == Fork(1, Parting(3, "10 11 12 ", "20 21 ", "13 14 "))
    assert found[3] == Fork(1, Parting(3, "10 11 12 ", "99 14 30 31 ", "13 14 "))


def test_branches_are_known_without_tokens() -> None:
    assert forks(replace(branching_episode(), rows=[]), TokenTexts()) == {2: Fork(1, None), 3: Fork(1, None)}


def test_each_completion_has_its_own_figures() -> None:
    episode = branching_episode()
    figures = completion_figures(episode, trained_of(episode, 0.5))
    assert {index: each.tokens for index, each in figures.items()} == {0: 1, 1: 2, 2: 1, 3: 1}
    assert all(each.advantage == 0.5 and each.trained for each in figures.values())
    assert figures[0].returns == pytest.approx(0.9)
