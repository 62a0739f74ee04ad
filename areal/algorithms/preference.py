"""What pairs teach: of two answers to one question, one was preferred. In double precision; P pairs.

Both losses are -log σ(margin), by Bradley and Terry's model of who wins, and differ in the margin: for a reward model
it is the difference of two scores, for DPO (Rafailov et al. 2023) that of two log-ratios to a reference, times β.

A loss is given with its slope, the derivative by the margin. The margin is a sum over the tokens of two sequences, so
once the slope is known, the gradient of the loss is that of a weighted sum of token scores: however the tokens of a
pair are cut into passes or dealt to ranks, their gradients add up to it.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class JudgedPairs:
    """What is known of pairs from the sums of their scores [P,2], the chosen one's first."""

    loss: Tensor
    """[P]"""
    margins: Tensor
    """[P]: how much the chosen answer is ahead."""
    slopes: Tensor
    """[P,2]: d loss / d sum."""
    figures: dict[str, Tensor] = field(default_factory=dict)
    """[P] each, by name."""

    def means(self) -> dict[str, float]:
        """Over pairs; one without a winner is half right."""
        right = (self.margins.sign() + 1) / 2
        each = {"loss": self.loss, "accuracy": right, "margin": self.margins, **self.figures}
        return {name: float(values.mean()) for name, values in each.items()}


def preference_loss(margins_P: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:  # noqa: N803
    """-(1 - ε) log σ(m) - ε log σ(-m) and its slope: a share ε of the pairs is taken to be labelled the wrong way."""
    margins = margins_P.double()
    right, wrong = -F.logsigmoid(margins), -F.logsigmoid(-margins)
    loss = (1 - label_smoothing) * right + label_smoothing * wrong
    return loss, label_smoothing - torch.sigmoid(-margins)


def bradley_terry(scores_P2: Tensor, label_smoothing: float = 0.0) -> JudgedPairs:  # noqa: N803
    """Of a reward model: the margin is the difference of two scores."""
    scores = scores_P2.double()
    margins = scores[:, 0] - scores[:, 1]
    loss, slope = preference_loss(margins, label_smoothing)
    figures = {"chosen_score": scores[:, 0], "rejected_score": scores[:, 1]}
    return JudgedPairs(loss, margins, torch.stack((slope, -slope), dim=1), figures)


def dpo(
    logprobs_P2: Tensor,  # noqa: N803
    reference_P2: Tensor,  # noqa: N803
    lengths_P2: Tensor,  # noqa: N803
    beta: float,
    label_smoothing: float = 0.0,
    nll_weight: float = 0.0,
) -> JudgedPairs:
    """The margin is β (log π/ref of the chosen answer - log π/ref of the rejected one), from sums over their tokens.

    `nll_weight` adds the chosen answer's negative log-likelihood per token (Pang et al. 2024).
    """
    logprobs, lengths = logprobs_P2.double(), lengths_P2[:, 0].double()
    ratios = logprobs - reference_P2.double()
    margins = beta * (ratios[:, 0] - ratios[:, 1])
    loss, slope = preference_loss(margins, label_smoothing)
    nll = -logprobs[:, 0] / lengths
    slopes = torch.stack((beta * slope - nll_weight / lengths, -beta * slope), dim=1)
    figures = {"chosen_logratio": ratios[:, 0], "rejected_logratio": ratios[:, 1], "chosen_nll": nll}
    return JudgedPairs(loss + nll_weight * nll, margins, slopes, figures)
