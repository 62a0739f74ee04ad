"""The algorithm that an update computes, with a value for everything that a preset may leave open.

`ActorConfig` is what a user wrote; presets.py makes an `Algorithm` of it. Its fields have the names of the settings,
which are explained there. The stages of which it names the variants are in areal/algorithms/.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from areal.config.errors import ConfigError, require

Unset = Literal["preset"]
"""The value of a setting that the user left to the preset."""


@dataclass(frozen=True)
class Stage:
    """One of the places of an update where a name chooses the function."""

    choices: tuple[str, ...]
    parameters: tuple[str, ...]
    """Of a user's own function, by position."""


STAGES = {
    "advantage": Stage(("baseline",), ("returns_N", "groups_N", "completions_N", "episodes_N")),
    "ratio": Stage(("token", "sequence"), ("log_ratio_N", "completions")),
    "correction": Stage(("token", "sequence", "geometric"), ("log_weight_N", "advantages_N", "completions")),
    "objective": Stage(
        ("clip", "importance", "cispo", "sapo", "reinforce"), ("logprobs_N", "log_ratio_N", "advantages_N", "algorithm")
    ),
    "kl": Stage(("k1", "k2", "k3", "k3_corrected"), ("log_difference_N", "log_ratio_N")),
    "loss_norm": Stage(("token", "completion", "episode", "constant"), ("completions_N", "episodes_N", "algorithm")),
}
"""By the setting that chooses: `actor.objective: clip`, or a function's import string, `my_module.my_objective`."""


@dataclass(frozen=True)
class Algorithm:
    name: str
    """Of the preset."""
    advantage: str
    group_baseline: Literal["mean", "leave_one_out", "batch", "none"]
    adv_norm: Literal["none", "group", "batch"]
    gae_lambda: float
    gae_over: Literal["completion", "episode"]
    discount: float
    overlong_share: float
    ratio: str
    objective: str
    eps_clip: float
    eps_clip_higher: float | None
    dual_clip: float | None
    sapo_temperature: float
    sapo_temperature_negative: float
    use_decoupled_loss: bool
    correction: str
    correction_bound: Literal["mask", "truncate"]
    behave_imp_weight_cap: float | None
    behave_imp_weight_floor: float | None
    second_moment: float | None
    negative_mask: float | None
    kl_ctl: float
    kl: str
    kl_in: Literal["loss", "reward", "token_reward"]
    entropy_coef: float
    loss_norm: str
    loss_length: int
    dynamic_sampling: bool

    @property
    def clips(self) -> tuple[float, float]:
        """The ratio is bounded below and above by 1 - the first and 1 + the second."""
        return self.eps_clip, self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher

    def check(self) -> None:
        """Refuse what means nothing, with the remedy; messages begin with the setting's own name."""
        for setting in STAGES:
            find_function(setting, getattr(self, setting))
        require(
            self.ratio == "token" or self.objective not in ("cispo", "reinforce"),
            f"ratio={self.ratio} has no meaning for objective={self.objective}, which weighs single tokens; leave "
            "ratio out, or use objective=clip or sapo",
        )
        require(
            self.kl_ctl == 0 or self.kl_in != "loss" or self.kl != "k1",
            "kl=k1 in the loss has a gradient that is 0 on average, so it pulls nowhere; use kl=k2 or k3, or put it in "
            "the reward with kl_in=reward",
        )
        require(
            self.kl_ctl == 0 or self.kl_in == "loss" or self.kl == "k1",
            f"kl_in={self.kl_in} needs kl=k1, got {self.kl}: in a reward only k1 has the gradient of the KL; set kl=k1",
        )
        for name in ("second_moment", "negative_mask"):
            value = getattr(self, name)
            require(
                value is None or self.use_decoupled_loss,
                f"{name}={value} is part of the correction, which only the decoupled loss has; set "
                "use_decoupled_loss=true, or leave it out",
            )
        low, high = self.behave_imp_weight_floor, self.behave_imp_weight_cap
        require(
            low is None or high is None or low < high,
            f"behave_imp_weight_floor={low} must lie below behave_imp_weight_cap={high}",
        )


def find_function(setting: str, name: str) -> Callable[..., Any] | None:
    """A user's own function for a stage, by its import string; None = the name is one of the built-in variants."""
    stage = STAGES[setting]
    if name in stage.choices:
        return None
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"{setting} must be one of {', '.join(stage.choices)}, or a function's import string like "
            f"my_module.my_{setting}; got {name!r}"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(f"{setting} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    wanted = f"{attribute}({', '.join(stage.parameters)})"
    if not callable(found):
        raise ConfigError(f"{setting} must name a function {wanted}, got {name!r}, which cannot be called")
    try:
        inspect.signature(found).bind(*stage.parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting} must name a function {wanted}, got {name!r}: {error}") from None
    return found  # type: ignore[no-any-return]
