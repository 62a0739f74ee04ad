"""The losses of a policy and of its critic, as values: the ranks of a sharded model are sent them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithms.entropy import negative_entropy
from areal.algorithms.objective import PolicyLoss
from areal.algorithms.ratio import Completions, log_ratios
from areal.algorithms.stages import stage
from areal.algorithms.values import value_loss
from areal.config.algorithm import Algorithm
from areal.engine.training.figures import Figures


@dataclass(frozen=True)
class PolicyObjective:
    """A `Loss`, of the stages that have a gradient. The fields are those that `areal/trainer/update.py` makes.

    `proximal`, `reference` and `correction` may be missing, and so may those that say which completion a token is of.
    """

    algorithm: Algorithm
    decoupled: bool
    """The ratio is taken to `proximal`, and the loss weighed by `correction`."""
    recomputed: bool
    """Not decoupled: the ratio is taken to `proximal`, not to `behaviour`."""

    def __call__(self, logprobs: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Figures]:
        algorithm, weights, behaviour = self.algorithm, fields["weights"], fields["behaviour"]
        anchor = fields["proximal"] if self.decoupled or self.recomputed else behaviour
        log_ratio = stage("ratio", algorithm.ratio)(log_ratios(logprobs, anchor), _completions(fields))
        policy = stage("objective", algorithm.objective)(logprobs, log_ratio, fields["advantages"], algorithm)
        if isinstance(policy, Tensor):  # a user's own
            policy = PolicyLoss.unclipped(policy)
        losses = policy.loss * fields["correction"] if self.decoupled else policy.loss
        totals = {
            "trained_tokens": len(weights),
            "sum_ratio": log_ratio.detach().exp().sum(),
            "sum_clipped_low": policy.clipped_low.sum(),
            "sum_clipped_high": policy.clipped_high.sum(),
            "sum_dual_clipped": policy.dual_clipped.sum(),
        }
        from_sampler = log_ratios(logprobs, behaviour)
        if "reference" in fields and algorithm.kl_in == "loss":
            kl = stage("kl", algorithm.kl)(logprobs - fields["reference"], from_sampler)
            losses = losses + algorithm.kl_ctl * kl
            totals["sum_kl"] = kl.detach().sum()
        if algorithm.entropy_coef:
            losses = losses + algorithm.entropy_coef * negative_entropy(logprobs, from_sampler)
        difference = (logprobs.detach() - behaviour).abs() * fields["checkable"]
        totals |= {"sum_logprob_difference": difference.sum(), "checked_tokens": fields["checkable"].sum()}
        highest = {"max_logprob_difference": difference.max(), "ratio_max": log_ratio.detach().exp().max()}
        return (losses * weights).sum(), Figures(total=totals, maximum=highest)


def _completions(fields: dict[str, Tensor]) -> Completions | None:
    """Of the tokens of a pass, where the ratio needs them."""
    if "completions" not in fields:
        return None
    _, index = torch.unique(fields["completions"], return_inverse=True)
    return Completions(index, fields["completion_tokens"], fields.get("whole_log_ratio"))


@dataclass(frozen=True)
class ValueObjective:
    """A `Loss` of values, against the `targets` and the `old_values` that areal/trainer/critic.py makes."""

    eps_clip: float | None

    def __call__(self, values: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Figures]:
        weights = fields["weights"]
        found = value_loss(values, fields["old_values"], fields["targets"], self.eps_clip)
        return (found.loss * weights).sum(), Figures(mean={"clip_ratio": (found.clipped * weights).sum()})
