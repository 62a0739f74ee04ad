"""What the tree gives back is what was put in, whatever was split, shared or dropped in between."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.engine.inference.prefix_tree import TOKEN_DIM, PrefixTree

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
BYTES_PER_TOKEN = 2 * 3 * 4


def block_of(ids: list[int]) -> Tensor:
    """A block in which each token's values depend on everything up to it, as keys and values do."""
    sums, total = [], 1.0
    for token in ids:
        total = (total * 7 + token) % 1009
        sums.append(total)
    return torch.tensor(sums)[None, None, :, None].expand(1, 2, len(ids), 3).clone()


def found(tree: PrefixTree, ids: list[int]) -> Tensor:
    blocks = tree.find(ids)
    return torch.cat(blocks, dim=TOKEN_DIM) if blocks else block_of(ids)[:, :, :0]


@settings(max_examples=150, deadline=None)
@given(st.lists(IDS, max_size=15), IDS)
def test_the_longest_known_prefix_is_found_with_its_own_values(added: list[list[int]], asked: list[int]) -> None:
    tree = PrefixTree(1 << 30)
    for ids in added:
        tree.add(ids, block_of(ids))
    known = {tuple(ids[:length]) for ids in added for length in range(1, len(ids) + 1)}
    longest = max((n for n in range(len(asked) + 1) if tuple(asked[:n]) in known), default=0)
    assert torch.equal(found(tree, asked), block_of(asked)[:, :, :longest])
    assert tree.bytes == len(known) * BYTES_PER_TOKEN  # what is shared is stored once


@settings(max_examples=100, deadline=None)
@given(st.lists(IDS, min_size=1, max_size=30), st.integers(1, 20))
def test_the_budget_holds_and_what_is_left_is_right(added: list[list[int]], tokens: int) -> None:
    tree = PrefixTree(tokens * BYTES_PER_TOKEN)
    for ids in added:
        tree.add(ids, block_of(ids))
        assert 0 <= tree.bytes <= tree.budget_bytes
        for asked in added:
            kept = found(tree, asked)
            assert torch.equal(kept, block_of(asked)[:, :, : kept.shape[TOKEN_DIM]])


def test_what_was_used_last_stays_longest() -> None:
    tree = PrefixTree(10 * BYTES_PER_TOKEN)
    for first in (1, 2, 3):
        tree.add([first] * 3, block_of([first] * 3))
    tree.find([1] * 3)
    tree.add([4] * 3, block_of([4] * 3))
    assert [found(tree, [first] * 3).shape[TOKEN_DIM] for first in (1, 2, 3, 4)] == [3, 0, 3, 3]


def test_a_conversation_of_many_turns_is_found_in_few_blocks() -> None:
    tree = PrefixTree(1 << 30)
    ids = [token % 7 for token in range(400)]
    for turn in range(2, 401, 2):
        tree.add(ids[:turn], block_of(ids[:turn]))
    assert len(tree.find(ids)) <= 9  # of 200 turns
    assert torch.equal(found(tree, ids), block_of(ids))
    other = [*ids[:301], 8, 8]
    tree.add(other, block_of(other))
    assert torch.equal(found(tree, ids), block_of(ids))
    assert torch.equal(found(tree, other), block_of(other))
    assert tree.bytes == 402 * BYTES_PER_TOKEN


def test_nothing_is_known_after_clear() -> None:
    tree = PrefixTree(1 << 20)
    tree.add([1, 2], block_of([1, 2]))
    tree.clear()
    assert tree.find([1, 2]) == []
    assert tree.bytes == 0
