"""Which function computes a stage: a built-in variant by its name, or a user's own by its import string.

A name travels to other processes, never a function.
"""

from collections.abc import Callable
from typing import Any

from areal.algorithms import correction, kl, objective, ratio, weights
from areal.config.algorithm import find_function

VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "ratio": {"token": ratio.token_ratio, "sequence": ratio.sequence_ratio},
    "correction": {
        "token": correction.token_weights,
        "sequence": correction.sequence_weights,
        "geometric": correction.geometric_weights,
    },
    "objective": {
        each.__name__: each
        for each in (objective.clip, objective.importance, objective.cispo, objective.sapo, objective.reinforce)
    },
    "kl": {each.__name__: each for each in (kl.k1, kl.k2, kl.k3, kl.k3_corrected)},
    "loss_norm": dict.fromkeys(("token", "completion", "episode", "constant"), weights.chosen_weights),
}


def stage(setting: str, name: str) -> Callable[..., Any]:
    """The function that a setting names. Raises ConfigError, with the choices, for one that there is not."""
    return find_function(setting, name) or VARIANTS[setting][name]
