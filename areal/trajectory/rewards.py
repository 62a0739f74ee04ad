"""Rewards on the tree: given by the agent to completions, flowing back along the conversation as returns."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

from areal.api.errors import NoInteractions, RewardInvalid
from areal.trajectory.completion import Completion
from areal.trajectory.tree import Tree


def assign_reward(tree: Tree, reward: Any, agent_name: str) -> None:
    """A number goes to the completion that finished last; a dict maps completion ids to rewards. All or nothing."""
    last = tree.last
    if last is None:
        raise NoInteractions(f"{agent_name} returned {_shown(reward)} but finished no call of the model")
    if not isinstance(reward, Mapping):
        last.reward = _number(reward, agent_name, "")
        return
    if not reward:
        raise RewardInvalid(f"{agent_name} returned an empty dict of rewards; return None to reject the episode")
    given = [
        (_known(tree, key, agent_name), _number(value, agent_name, f" for {key!r}")) for key, value in reward.items()
    ]
    for completion, value in given:
        completion.reward = value


def returns(tree: Tree, turn_discount: float) -> list[float]:
    """By completion index: the own reward (0 if none) plus the discounted mean of the children's returns."""
    totals = [0.0] * len(tree.completions)
    paid: list[list[float]] = [[] for _ in tree.completions]
    for node in reversed(tree.completions):  # children come after their parents
        children = paid[node.index]
        later = sum(children) / len(children) if children else 0.0
        totals[node.index] = (node.reward or 0.0) + turn_discount * later
        if node.parent is not None:
            paid[node.parent].append(totals[node.index])
    return totals


def _known(tree: Tree, key: Any, agent_name: str) -> Completion:
    completion = tree.by_id(key) if isinstance(key, str) else None
    if completion is None:
        raise RewardInvalid(
            f"{agent_name} rewarded {_shown(key)}, which is no finished completion of its session; "
            "use the `id` of a response as the key"
        )
    return completion


def _number(value: Any, agent_name: str, where: str) -> float:
    """numpy and torch scalars are asked for their Python value, so neither library is needed here."""
    plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
    if not isinstance(plain, numbers.Real):
        raise RewardInvalid(f"a reward must be a finite number, {agent_name} returned {_shown(value)}{where}")
    number = float(plain)
    if not math.isfinite(number):
        raise RewardInvalid(f"a reward must be finite, {agent_name} returned {_shown(value)}{where}")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 200 else text[:200] + '…'}"
