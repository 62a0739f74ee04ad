"""A tree as training rows. Both styles hold the same sampled tokens, each exactly once in a loss mask."""

# MERGED-DOC
# A tree as a person reads it: its longest conversation, pictures named, each answer with the reward it got.

from typing import Literal

import numpy as np

from areal.api.messages import Array, Row
from areal.trajectory.completion import Completion
from areal.trajectory.message import Message, readable
from areal.trajectory.rewards import returns
from areal.trajectory.tree import Tree


def export(tree: Tree, style: Literal["individual", "concat"], turn_discount: float) -> list[Row]:
    """individual: a row per completion; concat: a row per leaf, a shared completion trained in its first row only."""
    totals = returns(tree, turn_discount)
    if style == "individual":
        return [_row(tree, node, {node.index}, totals) for node in tree.completions]
    if style == "concat":
        return _leaf_rows(tree, totals)
    raise ValueError(f"export style must be individual or concat, got {style!r}")


def _leaf_rows(tree: Tree, totals: list[float]) -> list[Row]:
    inner = {node.parent for node in tree.completions if node.extends}
    trained: set[int] = set()
    rows = []
    for leaf in tree.completions:
        if leaf.index not in inner:
            fresh = {node.index for node in tree.token_path(leaf)} - trained
            rows.append(_row(tree, leaf, fresh, totals))
            trained |= fresh
    return rows


def _row(tree: Tree, last: Completion, trained: set[int], totals: list[float]) -> Row:
    """The ids up to the end of `last`; sampled tokens of completions that are not `trained` here count as prompt."""
    path = tree.token_path(last)
    length = sum(len(node.prompt_ids) + len(node.output_ids) for node in path)
    row = _prompt_row(length, last)
    row.images = [picture.data for node in path for picture in node.pictures]
    begin = 0
    for node in path:
        middle = begin + len(node.prompt_ids)
        end = middle + len(node.output_ids)
        row.input_ids[begin:middle] = node.prompt_ids
        row.input_ids[middle:end] = node.output_ids
        if node.index in trained:
            _mark_sampled(row, slice(middle, end), node, totals[node.index])
        begin = end
    return row


def _prompt_row(length: int, last: Completion) -> Row:
    def full(value: float, dtype: type[np.generic]) -> Array:
        return np.full(length, value, dtype)

    return Row(
        input_ids=full(0, np.int32),
        loss_mask=full(False, np.bool_),
        logprobs=full(0, np.float32),
        versions=full(-1, np.int32),
        returns=full(0, np.float32),
        completion_index=full(-1, np.int32),
        temperatures=full(1, np.float32),
        reward=last.reward or 0.0,
        truncated=last.truncated,
    )


def _mark_sampled(row: Row, where: slice, node: Completion, total: float) -> None:
    row.loss_mask[where] = True
    row.logprobs[where] = node.logprobs
    row.versions[where] = node.versions
    row.returns[where] = total
    row.completion_index[where] = node.index
    row.temperatures[where] = node.temperature


def transcript(tree: Tree) -> list[Message]:
    """Messages first to last; an answer that was rewarded has a `reward`. Of equally long conversations, the latest."""
    if not tree.completions:
        return []
    lengths: list[int] = []
    for node in tree.completions:
        lengths.append((0 if node.parent is None else lengths[node.parent]) + len(node.messages) + 1)
    leaf = max(tree.completions, key=lambda node: (lengths[node.index], node.index))
    messages: list[Message] = []
    for node in _path(tree, leaf):
        messages += [readable(message) for message in node.messages]
        messages.append(dict(node.message) if node.reward is None else {**node.message, "reward": node.reward})
    return messages


def _path(tree: Tree, leaf: Completion) -> list[Completion]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(tree.completions[path[-1].parent])
    return path[::-1]
