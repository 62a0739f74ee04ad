"""Rewards on the tree: given by the agent to completions, flowing back along the conversation as returns."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal.api.errors import NoInteractions, RewardInvalid
from areal.api.reward_api import LARGEST_REWARD, as_reward
from areal.trajectory.tree import Completion, Tree
from areal.utils.shorten import shown


def assign_reward(tree: Tree, reward: Any, agent_name: str) -> None:
    """A number goes to the completion that finished last; a dict maps completion ids to rewards. All or nothing.

    The rewards of a tree may not add up to more than float32 holds, so that no return of any discount can.
    """
    last = tree.last
    if last is None:
        raise NoInteractions(f"{agent_name} returned the reward {shown(reward)} but finished no call of the model")
    if not isinstance(reward, Mapping):
        given = {last.index: as_reward(reward, agent_name)}
    elif reward:
        given = {
            _completion(tree, key, agent_name).index: as_reward(value, f"{agent_name} for {shown(key)}")
            for key, value in reward.items()
        }
    else:
        raise RewardInvalid(f"{agent_name} returned an empty dict of rewards; return None to reject the episode")
    total = sum(abs(given.get(node.index, node.reward or 0.0)) for node in tree.completions)
    if total > LARGEST_REWARD:
        raise RewardInvalid(
            f"the sizes of an episode's rewards must add up to at most {LARGEST_REWARD:.3g} (float32), got {total:.3g} "
            f"from {agent_name}; scale rewards down"
        )
    for index, value in given.items():
        tree.completions[index].reward = value


def returns(tree: Tree, turn_discount: float) -> list[float]:
    """By completion index: the own reward (0 if none) plus the discounted mean of the children's returns."""
    rewards = [node.reward or 0.0 for node in tree.completions]
    return discounted_returns(rewards, [node.parent for node in tree.completions], turn_discount)


def discounted_returns(rewards: Sequence[float], parents: Sequence[int | None], discount: float) -> list[float]:
    """Of each node, by index: its reward plus the discounted mean of its children's returns. Parents come first."""
    totals = list(rewards)
    of_children: list[list[float]] = [[] for _ in rewards]
    for index in reversed(range(len(totals))):
        later = of_children[index]
        totals[index] += discount * (sum(later) / len(later) if later else 0.0)
        parent = parents[index]
        if parent is not None:
            of_children[parent].append(totals[index])
    return totals


def _completion(tree: Tree, key: Any, agent_name: str) -> Completion:
    completion = tree.by_id(key) if isinstance(key, str) else None
    if completion is None:
        raise RewardInvalid(
            f"{agent_name} rewarded {type(key).__name__} {shown(key)}, which is not a finished completion of its "
            "session; use the `id` of a response as the key"
        )
    return completion
