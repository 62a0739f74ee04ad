"""What an agent's episode leaves: its session's tree, rewarded and exported."""

from typing import Any

from areal.api.errors import NoInteractions
from areal.api.messages import Episode
from areal.config.rollout import AgentConfig
from areal.trajectory import Tree, assign_reward, export, transcript


def harvest(tree: Tree, reward: Any, name: str, config: AgentConfig) -> Episode | None:
    """The episode of an agent called `name` that returned `reward`; None = it rejected the episode itself."""
    if reward is None and tree.last is not None:
        return None
    if reward is None:
        raise NoInteractions(f"{name} returned None and finished no call of the model")
    assign_reward(tree, reward, name)
    return gather(tree, config)


def gather(tree: Tree, config: AgentConfig) -> Episode:
    """The episode of a tree that has its rewards."""
    rows = export(tree, config.export_style, config.turn_discount)
    turns = [(node.asked_at, node.answered_at, len(node.output_ids)) for node in tree.completions]
    return Episode(rows, tree.reward, transcript(tree), calls=len(tree.completions), turns=turns)
