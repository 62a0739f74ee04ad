"""Algorithms by name (`actor.algorithm`): what each preset fills in where the user wrote nothing, and whose it is.

A number that a paper gives has the paper beside it; papers are named by their arXiv id. What a preset does not name has
the value of `DEFAULTS`, which together are the preset `default`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from areal.config.algorithm import Algorithm
from areal.config.errors import ConfigError

if TYPE_CHECKING:
    from areal.config.training import ActorConfig

DECOUPLED = "+decoupled"
"""After the name of a preset with the clipped objective: clipped around the policy before the step."""

DEFAULTS: dict[str, Any] = {
    "advantage": "baseline",
    "group_baseline": "mean",
    "adv_norm": "none",
    "gae_lambda": 1.0,
    "gae_over": "completion",
    "discount": 1.0,
    "overlong_share": 0.0,
    "ratio": "token",
    "objective": "clip",
    "eps_clip": 0.2,  # 1707.06347, section 6.1
    "eps_clip_higher": None,
    "dual_clip": 3.0,  # 1912.09729, equation 5; its value as in 2209.08483, appendix G
    "sapo_temperature": 1.0,  # 2511.20347, section 5
    "sapo_temperature_negative": 1.05,  # the same
    "use_decoupled_loss": False,
    "correction": "token",
    "correction_bound": "mask",
    "behave_imp_weight_cap": 5.0,  # as the code of 2505.24298 has it
    "behave_imp_weight_floor": None,
    "second_moment": None,
    "negative_mask": None,
    "kl_ctl": 0.0,
    "kl": "k3",
    "kl_in": "loss",
    "entropy_coef": 0.0,
    "loss_norm": "token",
    "loss_length": None,
    "dynamic_sampling": False,
}


@dataclass(frozen=True)
class Preset:
    paper: str
    """What it is from."""
    values: Mapping[str, Any]
    """Where it differs from `DEFAULTS`."""


PRESETS = {
    "default": Preset("1707.06347's clip over groups, 1912.09729's dual clip", {}),
    "decoupled": Preset(
        "2505.24298 (AReaL), after 2110.00641",
        {"use_decoupled_loss": True},
    ),
    "grpo": Preset(
        "2402.03300",
        {
            "dual_clip": None,
            "adv_norm": "group",  # section 4.1.2
            "loss_norm": "completion",  # equation 3: 1/|o|
            "kl_ctl": 0.04,  # section 4.2
            "kl": "k3",  # equation 4
        },
    ),
    "dr_grpo": Preset(
        "2503.20783",
        {
            "dual_clip": None,
            "adv_norm": "none",  # section 3.2: no division by the deviation
            "loss_norm": "constant",  # section 3.2: nor by the length
        },
    ),
    "dapo": Preset(
        "2503.14476",
        {
            "dual_clip": None,
            "eps_clip": 0.2,  # section 4.1
            "eps_clip_higher": 0.28,  # section 4.1
            "adv_norm": "group",  # equation 9
            "loss_norm": "token",  # equation 12
            "overlong_share": 0.2,  # section 4.1: a cache of 4,096 of 20,480 tokens
            "dynamic_sampling": True,  # equation 11
        },
    ),
    "rloo": Preset(
        "2402.14740",
        {
            "group_baseline": "leave_one_out",  # section 2.3
            "objective": "reinforce",
            "loss_norm": "constant",
            "loss_length": 1,  # a completion counts as a whole: its log-prob is the sum of its tokens'
            "kl_ctl": 0.03,  # appendix C, for TL;DR
            "kl": "k1",
            "kl_in": "reward",  # equation 3
        },
    ),
    "reinforce++": Preset(
        "2501.03262",
        {
            "dual_clip": None,
            "group_baseline": "batch",  # the whole batch is centred and scaled
            "adv_norm": "batch",
            "kl": "k1",
            "kl_in": "token_reward",
        },
    ),
    "gspo": Preset(
        "2507.18071",
        {
            "dual_clip": None,
            "ratio": "sequence",  # equation 7
            "eps_clip": 3e-4,  # section 5.1
            "eps_clip_higher": 4e-4,  # section 5.1
            "adv_norm": "group",  # equation 6
            "loss_norm": "completion",  # equation 5
            "correction": "geometric",  # with +decoupled, of one level with the ratio
        },
    ),
    "cispo": Preset(
        "2506.13585 (MiniMax-M1)",
        {
            "objective": "cispo",  # equation 4
            "eps_clip": 1.0,  # section 3.1: no bound below
            # MiniMax-M1 gives no number; 2510.13786 (ScaleRL, appendix A.17) found ratios of at most 4, 5 and 8 alike.
            "eps_clip_higher": 4.0,
            "adv_norm": "group",  # equation 2
            "loss_norm": "token",  # equation 4
        },
    ),
    "sapo": Preset(
        "2511.20347",
        {
            "objective": "sapo",
            "sapo_temperature": 1.0,  # section 5
            "sapo_temperature_negative": 1.05,  # section 5
            "adv_norm": "group",
            "loss_norm": "completion",
        },
    ),
    "ppo": Preset(
        "1707.06347, for language models as in 2203.02155",
        {
            "dual_clip": None,
            "group_baseline": "none",  # values are the baseline: it needs a critic
            "gae_lambda": 0.95,  # 1707.06347, table 3
            "discount": 1.0,  # 2203.02155, appendix C: no discount
            "kl": "k1",
            "kl_in": "token_reward",  # 2203.02155, equation 2
        },
    ),
    "m2po": Preset(
        "2510.01161",
        {
            "objective": "importance",
            "use_decoupled_loss": True,
            "behave_imp_weight_cap": None,
            "second_moment": 0.04,  # section 5.2
            "adv_norm": "group",
            "loss_norm": "token",
        },
    ),
}

Origin = Literal["preset", "you", "default"]


@dataclass(frozen=True)
class ResolvedSetting:
    """A line of the resolved table."""

    name: str
    value: Any
    origin: Origin
    instead_of: str = ""
    """What the preset would have filled in, where the user's value differs from it."""


@dataclass(frozen=True)
class Resolved:
    algorithm: Algorithm
    table: list[ResolvedSetting]


def resolve(
    actor: "ActorConfig", *, stale: bool = False, reference: bool = False, max_new_tokens: int = 512
) -> Resolved:
    """What is computed, and where each value comes from.

    `stale`: samples may be of older weights, which makes `decoupled` the preset of those who name none. `reference`:
    there is a model for a KL penalty to compare with; without one, a preset asks for none.
    """
    name = actor.algorithm or ("decoupled" if stale else "default")
    filled = _values(name)
    if not reference:
        filled.pop("kl_ctl", None)
    table = []
    for setting, default in DEFAULTS.items():
        given, proposed = getattr(actor, setting), filled.get(setting, default)
        if given == "preset":
            table.append(ResolvedSetting(setting, proposed, "preset" if setting in filled else "default"))
        else:
            is_other = setting in filled and given != proposed
            table.append(ResolvedSetting(setting, given, "you", as_text(proposed) if is_other else ""))
    values = {each.name: each.value for each in table}
    values["loss_length"] = values["loss_length"] or max_new_tokens
    return Resolved(Algorithm(name, **values), table)


def filled(actor: "ActorConfig", algorithm: Algorithm) -> "ActorConfig":
    """The same settings with nothing left to a preset: what a run writes down."""
    return replace(actor, algorithm=algorithm.name, **{name: getattr(algorithm, name) for name in DEFAULTS})


def _values(name: str) -> dict[str, Any]:
    base = name.removesuffix(DECOUPLED)
    if base not in PRESETS:
        near = difflib.get_close_matches(base, PRESETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"algorithm must be one of {', '.join(PRESETS)}, or one with {DECOUPLED}, got {name!r}{hint}")
    values = dict(PRESETS[base].values)
    if base == name:
        return values
    if values.get("objective", "clip") != "clip" or values.get("use_decoupled_loss"):
        fitting = [each for each, preset in PRESETS.items() if "objective" not in preset.values and each != "decoupled"]
        raise ConfigError(
            f"{DECOUPLED} is for presets with the clipped objective ({', '.join(fitting)}), got {name!r}; use {base}"
        )
    return {**values, "use_decoupled_loss": True}


def lines(resolved: Resolved) -> list[str]:
    """The resolved table for people: what differs from the defaults, and where the rest is written down."""
    chosen = [each for each in resolved.table if each.origin != "default"]
    rows = [
        (each.name, as_text(each.value), f"{each.origin}, not {each.instead_of}" if each.instead_of else each.origin)
        for each in chosen
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return [
        f"algorithm {resolved.algorithm.name}",
        *(f"  {name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows),
        f"  {len(resolved.table) - len(chosen)} others have their defaults; config.yaml of the run has all",
    ]


def as_text(value: Any) -> str:
    """A value as a YAML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
