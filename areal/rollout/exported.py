"""Interactions that a RolloutWorkflow exported from a direct client, as an episode."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from areal.api.messages import Episode
from areal.proxy import Interaction


def is_interactions(result: Any) -> TypeGuard[Mapping[str, Interaction]]:
    if not isinstance(result, Mapping) or not result:
        return False
    return all(isinstance(value, Interaction) for value in result.values())


def episode_of(exported: Mapping[str, Interaction]) -> Episode:
    """Every row; the longest conversation, of equally long ones the latest, is the one a person reads."""
    told = max([*exported.values()][::-1], key=lambda each: len(each.messages))
    messages = [*told.messages[:-1], {**told.messages[-1], "reward": told.reward}]
    return Episode([each.row for each in exported.values()], sum(each.given for each in exported.values()), messages)
