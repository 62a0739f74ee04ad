"""Figures that explain an update: what the batch is like, how far the policy is from the sampler, what its weights are.

docs/algorithms.md says what each means.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from areal.algorithms.correction import Correction
from areal.algorithms.ratio import log_ratios
from areal.api.messages import Episode, GroupResult
from areal.engine.training.engine import TokenBatch

MAX_LAG = 8
"""Older samples are counted with those of this age."""
MAX_TURN = 8
"""Later turns have no figure of their own."""


def group_figures(groups: Sequence[GroupResult]) -> dict[str, float]:
    """Of the rewards: their spread, the groups that teach nothing, and single turns where there are several."""
    rewards = [[episode.reward for episode in group.episodes] for group in groups]
    figures = {
        "reward_std": float(np.std([reward for each in rewards for reward in each])),
        "groups_equal": float(np.mean([len(set(each)) < 2 for each in rewards])),
        "groups_all_right": float(np.mean([min(each) >= 1 for each in rewards])),
        "groups_all_wrong": float(np.mean([max(each) <= 0 for each in rewards])),
    }
    turns: dict[int, list[float]] = {}
    for group in groups:
        for episode in group.episodes:
            for turn, reward in _turn_rewards(episode):
                turns.setdefault(turn, []).append(reward)
    if max(turns, default=1) > 1:
        figures |= {f"reward/turn{turn}": float(np.mean(turns[turn])) for turn in sorted(turns) if turn <= MAX_TURN}
    return figures


def _turn_rewards(episode: Episode) -> list[tuple[int, float]]:
    """Which turn of its conversation each rewarded answer is, from 1, and its reward."""
    turns: list[int] = []
    for node in episode.nodes:
        turns.append(1 if node.parent is None else turns[node.parent] + 1)
    return [(turn, node.reward) for turn, node in zip(turns, episode.nodes, strict=True) if node.reward is not None]


def sampled_tokens(groups: Sequence[GroupResult]) -> int:
    """Of all calls of the episodes, whether they are trained or not."""
    episodes = [episode for group in groups for episode in group.episodes]
    return sum(max(each.trained_tokens, sum(tokens for _, _, tokens in each.turns)) for each in episodes)


def batch_figures(batch: TokenBatch, version: int) -> dict[str, float]:
    """Of all tokens that might be trained at `version`: how long completions are, and how old."""
    fields = batch.fields
    _, first, lengths = np.unique(fields["completions"].numpy(), return_index=True, return_counts=True)
    lags = torch.bincount((version - fields["versions"]).clamp(0, MAX_LAG)).double()
    return {
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated_completions": float(fields["truncated"].numpy()[first].mean()),
        **{f"staleness/lag{lag}": share for lag, share in enumerate((lags / lags.sum()).tolist()) if share},
    }


def weight_figures(correction: Correction) -> dict[str, float]:
    """Of the weights of the decoupled loss, over the tokens that are trained."""
    weights = correction.weights
    return {
        "behaviour_weight_mean": float(weights.mean()),
        "behaviour_weight_max": float(weights.max()),
        "behaviour_weight_masked": float(correction.masked.double().mean()),
        "effective_sample_share": effective_share(weights),
    }


def effective_share(weights: Tensor) -> float:
    """(Σ w)² / (N Σ w²): 1 = all count equally, 1 / N = only one counts."""
    squares = float(weights.square().sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares > 0 else 0.0


def token_figures(trained: Sequence[tuple[TokenBatch, Tensor, Tensor]], version: int) -> dict[str, float]:
    """Of the tokens of all minibatches with the log-probs and entropies of their training passes, at `version`."""
    parts = [part for part in trained if len(part[1])]
    if not parts:
        return {}
    present, entropies = (torch.cat([part[place] for part in parts]) for place in (1, 2))
    fields = {
        name: torch.cat([batch.fields[name] for batch, *_ in parts]) for name in ("behaviour", "versions", "unreported")
    }
    computed = present.isfinite()  # not those of updates that were skipped
    known = computed & ~fields["unreported"]
    if not bool(computed.any()):
        return {}
    figures = {"entropy": float(entropies[computed].double().mean())}
    if not bool(known.any()):
        return figures
    log_ratio = log_ratios(present[known].double(), fields["behaviour"][known].double())
    divergence = log_ratio.exp() - 1 - log_ratio
    figures["sampler_kl"] = float(divergence.mean())
    lags = (version - fields["versions"][known]).clamp(0, MAX_LAG)
    counts, sums = torch.bincount(lags).tolist(), torch.bincount(lags, divergence).tolist()
    for lag, (count, total) in enumerate(zip(counts, sums, strict=True)):
        if count:
            figures[f"sampler_kl/lag{lag}"] = total / count
    return figures
