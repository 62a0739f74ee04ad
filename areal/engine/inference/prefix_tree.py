"""Keys and values of token sequences that may begin a later prompt: conversations, shared prompts.

A radix tree: nodes are runs of tokens, so a prefix that several sequences share is stored once. A conversation that
grows turn by turn would be a node for each turn; a run is joined to the one before it once it is as long, so a path has
few nodes (their lengths at least halve) and a token is copied few times. The least recently used leaves are dropped
when the budget is spent. It knows nothing of weights: call `clear` when they change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOKEN_DIM = 2
"""Where the tokens are in a block of keys and values [layers, heads, tokens, size]."""


class PrefixTree:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self._clock = 0
        self._root = _Node([], torch.empty(0), None)

    def clear(self) -> None:
        self._root.children.clear()
        self.bytes = 0

    def find(self, ids: list[int]) -> list[Tensor]:
        """Blocks that together hold the longest stored prefix of `ids`."""
        return [node.block.narrow(TOKEN_DIM, 0, count) for node, count in self._path(ids)]

    def add(self, ids: list[int], block: Tensor) -> None:
        """Store `ids`; `block` has the keys and values of all of them, and the new ones are copied."""
        parent, start = self._root, 0
        for node, count in self._path(ids):
            start += count
            parent = node if count == len(node.ids) else self._split(node, count)
        if start == len(ids):
            return
        self._join(self._attach(parent, ids[start:], block.narrow(TOKEN_DIM, start, len(ids) - start).clone()))
        if self.bytes > self.budget_bytes:
            self._evict()

    def _path(self, ids: list[int]) -> "list[tuple[_Node, int]]":
        """Nodes along `ids`, each with how many of its tokens match; only the last may match in part."""
        self._clock += 1
        node, start = self._root, 0
        path: list[tuple[_Node, int]] = []
        while start < len(ids) and (child := node.children.get(ids[start])) is not None:
            count = child.shared(ids, start)
            child.used = self._clock
            path.append((child, count))
            if count < len(child.ids):
                break
            node, start = child, start + count
        return path

    def _attach(self, parent: "_Node", ids: list[int], block: Tensor) -> "_Node":
        node = _Node(ids, block, parent, used=self._clock)
        parent.children[ids[0]] = node
        self.bytes += block.nbytes
        return node

    def _join(self, leaf: "_Node") -> None:
        """Make one node of a leaf and the nodes before it that only lead to it and are not longer."""
        joined = [leaf]
        while (parent := joined[-1].parent) is not None and parent is not self._root:
            if len(parent.children) > 1 or len(parent.ids) > sum(len(node.ids) for node in joined):
                break
            joined.append(parent)
        first = joined[-1]
        if first is leaf:
            return
        first.ids = [token for node in reversed(joined) for token in node.ids]
        first.block = torch.cat([node.block for node in reversed(joined)], dim=TOKEN_DIM)
        first.children = {}

    def _split(self, node: "_Node", count: int) -> "_Node":
        """Make the first `count` tokens of a node a node of their own, and return it."""
        assert node.parent is not None
        self.bytes -= node.block.nbytes
        head = self._attach(node.parent, node.ids[:count], node.block.narrow(TOKEN_DIM, 0, count).clone())
        tail = node.block.narrow(TOKEN_DIM, count, len(node.ids) - count).clone()
        node.ids, node.block, node.parent = node.ids[count:], tail, head
        head.children[node.ids[0]] = node
        self.bytes += tail.nbytes
        return head

    def _evict(self) -> None:
        """Drop leaves, the least recently used first, until a tenth of the budget is free."""
        while self.bytes > 0.9 * self.budget_bytes:
            for leaf in sorted(self._leaves(), key=lambda node: node.used):
                if self.bytes <= 0.9 * self.budget_bytes:
                    return
                assert leaf.parent is not None
                del leaf.parent.children[leaf.ids[0]]
                self.bytes -= leaf.block.nbytes

    def _leaves(self) -> "list[_Node]":
        nodes, leaves = list(self._root.children.values()), []
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if not node.children:
                leaves.append(node)
        return leaves


@dataclass(eq=False)
class _Node:
    ids: list[int]
    block: Tensor
    parent: "_Node | None"
    children: "dict[int, _Node]" = field(default_factory=dict)
    used: int = 0
    """When it was last looked up, by the tree's own count."""

    def shared(self, ids: Sequence[int], start: int) -> int:
        """How many of this node's tokens `ids` has from `start` on."""
        mine = self.ids
        if mine == ids[start : start + len(mine)]:
            return len(mine)
        return next(i for i, token in enumerate(mine) if start + i >= len(ids) or ids[start + i] != token)
