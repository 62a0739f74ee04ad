"""A tree as a person reads it: its longest conversation, pictures named, each answer with the reward it got."""

from areal.trajectory.completion import Completion
from areal.trajectory.meaning import Message
from areal.trajectory.pictures import readable
from areal.trajectory.tree import Tree


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
