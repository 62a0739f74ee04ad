"""A tree as training rows, and as a person reads it: node by node, or the longest conversation.

Both styles of rows hold the same sampled tokens, each exactly once in a loss mask.
"""

from typing import Literal

import numpy as np

from areal.api.messages import Node, Row
from areal.trajectory.message import Message, readable
from areal.trajectory.rewards import returns
from areal.trajectory.tree import Completion, Tree

ExportStyle = Literal["individual", "concat"]
"""individual: a row per completion; concat: a row per leaf, a shared completion trained in its first row only."""


def export(tree: Tree, style: ExportStyle, turn_discount: float) -> list[Row]:
    totals = returns(tree, turn_discount)
    trained: set[int] = set()
    rows = []
    for last in row_ends(tree, style):
        path = tree.token_path(last)
        fresh = {last.index} if style == "individual" else {node.index for node in path} - trained
        rows.append(_row(path, fresh, totals))
        trained |= fresh
    return rows


def row_ends(tree: Tree, style: ExportStyle) -> list[Completion]:
    """The completion that each row ends with, in the order of the rows."""
    if style == "individual":
        return list(tree.completions)
    if style == "concat":
        inner = {node.parent for node in tree.completions if node.extends}
        return [node for node in tree.completions if node.index not in inner]
    raise ValueError(f"export style must be individual or concat, got {style!r}")


def nodes_of(tree: Tree) -> list[Node]:
    """The tree as others read it, without tokens, which the rows have. Times are the tree's.

    Nothing is copied but messages with images: answers to one request share theirs.
    """
    offered: dict[int, list[str]] = {}
    nodes = []
    for each in tree.completions:
        tools = each.tools or ()
        if id(tools) not in offered:
            offered[id(tools)] = [tool["function"]["name"] for tool in tools]
        nodes.append(
            Node(
                parent=each.parent,
                extends=each.extends,
                messages=_readable(each.messages),
                message=each.message,
                reward=each.reward,
                finish=each.finish_reason,
                tools=offered[id(tools)],
                asked=each.asked_at,
                answered=each.answered_at,
            )
        )
    return nodes


def transcript(tree: Tree) -> list[Message]:
    """The longest conversation, of equally long ones the latest.

    Images are described, and answers that were rewarded have a `reward`.
    """
    if not tree.completions:
        return []
    lengths: list[int] = []
    for node in tree.completions:
        lengths.append((0 if node.parent is None else lengths[node.parent]) + len(node.messages) + 1)
    leaf = max(tree.completions, key=lambda node: (lengths[node.index], node.index))
    messages: list[Message] = []
    for node in tree.path(leaf):
        messages += [readable(message) for message in node.messages]
        messages.append(dict(node.message) if node.reward is None else {**node.message, "reward": node.reward})
    return messages


def _readable(messages: list[Message]) -> list[Message]:
    """The very list if there is nothing to describe in it."""
    if any(isinstance(message["content"], list) for message in messages):
        return [readable(message) for message in messages]
    return messages


def _row(path: list[Completion], trained: set[int], totals: list[float]) -> Row:
    """The ids of a path; sampled tokens of completions that are not `trained` here count as prompt."""
    row = _prompt_row(sum(len(node.prompt_ids) + len(node.output_ids) for node in path), path[-1])
    row.images = [image.data for node in path for image in node.images]
    begin = 0
    for node in path:
        middle = begin + len(node.prompt_ids)
        end = middle + len(node.output_ids)
        row.input_ids[begin:middle] = node.prompt_ids
        row.input_ids[middle:end] = node.output_ids
        if node.index in trained:
            sampled = slice(middle, end)
            row.loss_mask[sampled] = True
            row.logprobs[sampled] = node.logprobs
            row.versions[sampled] = node.versions
            row.returns[sampled] = totals[node.index]
            row.completion_index[sampled] = node.index
            row.temperatures[sampled] = node.temperature
            if node.choices is not None:
                row.choices.append(node.choices.at(middle, len(node.output_ids)))
            if node.truncated and node is not path[-1]:
                row.truncated_completions.append(node.index)
        begin = end
    return row


def _prompt_row(length: int, last: Completion) -> Row:
    """A row whose fields are those of prompt tokens throughout."""
    none = np.full(length, -1, np.int32)
    return Row(
        input_ids=np.zeros(length, np.int32),
        loss_mask=np.zeros(length, np.bool_),
        logprobs=np.zeros(length, np.float32),
        versions=none,
        returns=np.zeros(length, np.float32),
        completion_index=none.copy(),
        temperatures=np.ones(length, np.float32),
        reward=last.reward or 0.0,
        truncated=last.truncated,
    )
