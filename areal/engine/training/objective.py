"""The losses of a policy and of its critic, as values: the ranks of a sharded model are sent them."""

from dataclasses import dataclass

from torch import Tensor

from areal.algorithms.losses import clipped_loss, decoupled_loss, kl_penalty
from areal.algorithms.values import value_loss
from areal.config.training import ActorConfig
from areal.engine.training.figures import Figures


@dataclass(frozen=True)
class PolicyObjective:
    """A `Loss`. Of the fields that `areal/trainer/update.py` makes, `proximal` and `reference` may be missing."""

    eps_clip: float
    eps_clip_higher: float
    dual_clip: float | None
    behave_imp_weight_cap: float | None
    kl_ctl: float
    decoupled: bool
    """Clip around `proximal` and weigh by its ratio to `behaviour`."""
    recomputed: bool
    """Not decoupled: the ratio is taken to `proximal`, not to `behaviour`."""

    @classmethod
    def of(cls, actor: ActorConfig, *, decoupled: bool, recomputed: bool) -> "PolicyObjective":
        return cls(
            actor.eps_clip,
            actor.eps_clip_higher or actor.eps_clip,
            actor.dual_clip,
            actor.behave_imp_weight_cap,
            actor.kl_ctl,
            decoupled,
            recomputed,
        )

    def __call__(self, logprobs: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Figures]:
        weights, behaviour, advantages = fields["weights"], fields["behaviour"], fields["advantages"]
        low, high = self.eps_clip, self.eps_clip_higher
        if self.decoupled:
            policy = decoupled_loss(
                logprobs,
                fields["proximal"],
                behaviour,
                advantages,
                low,
                high,
                self.behave_imp_weight_cap,
                self.dual_clip,
            )
        else:
            old = fields["proximal"] if self.recomputed else behaviour
            policy = clipped_loss(logprobs, old, advantages, low, high, self.dual_clip)
        loss = (policy.loss * weights).sum()
        means = {
            "clip_ratio": (policy.clipped * weights).sum(),
            "dual_clip_ratio": (policy.dual_clipped * weights).sum(),
        }
        if "reference" in fields:
            kl = (kl_penalty(logprobs, fields["reference"]) * weights).sum()
            loss = loss + self.kl_ctl * kl
            means["kl"] = kl.detach()
        difference = (logprobs.detach() - behaviour).abs() * fields["checkable"]
        totals = {
            "trained_tokens": len(weights),
            "sum_logprob_difference": difference.sum(),
            "checked_tokens": fields["checkable"].sum(),
        }
        return loss, Figures(mean=means, total=totals, maximum={"max_logprob_difference": difference.max()})


@dataclass(frozen=True)
class ValueObjective:
    """A `Loss` of values, against the `targets` and the `old_values` that areal/trainer/critic.py makes."""

    eps_clip: float | None

    def __call__(self, values: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Figures]:
        weights = fields["weights"]
        found = value_loss(values, fields["old_values"], fields["targets"], self.eps_clip)
        return (found.loss * weights).sum(), Figures(mean={"clip_ratio": (found.clipped * weights).sum()})
