"""The gradient of an update with every preset, and with variants of every stage, against plain loops.

The loops share no code with the package: they read rows, and take statistics, log-probs, weights and the objective
token by token in double precision; the gradient is left to autograd. Only values of settings come from the package.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from test_reference_gradient import PROMPT, TOKENS, TablePolicy
from torch import Tensor

from areal.api.messages import Episode, GroupResult, Row
from areal.config.algorithm import Algorithm
from areal.config.presets import PRESETS, resolve
from areal.config.training import ActorConfig, OptimizerConfig
from areal.engine.training.engine import ScoringEngine, TrainingEngine
from areal.trainer.update import PolicyUpdate

LIMIT = 9
"""Tokens that a completion may have."""


def make_groups(groups: int = 4, members: int = 3) -> list[GroupResult]:
    """Samples of an older policy; some episodes have two completions, in rows of their own."""
    draw = np.random.default_rng(11)
    table = TablePolicy().flat.view(TOKENS, TOKENS).log_softmax(1).detach().numpy()

    def row(index: int, reward: float) -> Row:
        length = PROMPT + int(draw.integers(2, LIMIT + 1))
        ids = draw.integers(0, TOKENS, length).astype(np.int32)
        mask = np.arange(length) >= PROMPT
        own = np.r_[0.0, table[ids[:-1], ids[1:]]] + draw.normal(0.0, 0.5, length)
        return Row(
            input_ids=ids,
            loss_mask=mask,
            logprobs=np.where(mask, own, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            returns=np.where(mask, reward, 0.0).astype(np.float32),
            completion_index=np.where(mask, index, -1).astype(np.int32),
            temperatures=np.ones(length, np.float32),
            reward=reward,
        )

    made = []
    for number in range(groups):
        episodes = []
        for member in range(members):
            turns = 2 if member == 1 else 1
            rows = [row(turn, float((number + 2 * member + turn) % 3)) for turn in range(turns)]
            episodes.append(Episode(rows, sum(each.reward for each in rows)))
        made.append(GroupResult(number, episodes, [], {}))
    return made


@dataclass
class Token:
    group: int
    episode: int
    completion: int
    before: int
    token: int
    behaviour: float
    reward: float
    ids: bytes
    proximal: float = 0.0
    reference: float = 0.0
    value: float = 0.0
    """Its return."""
    advantage: float = 0.0
    correction: float = 1.0


def tokens_of(groups: Sequence[GroupResult], first: Tensor, reference: Tensor | None) -> list[Token]:
    found, episode_number, completion_number = [], -1, -1
    for group in groups:
        for episode in group.episodes:
            episode_number += 1
            for row in episode.rows:
                completion_number += 1
                for place in np.flatnonzero(row.loss_mask):
                    before, token = int(row.input_ids[place - 1]), int(row.input_ids[place])
                    made = Token(
                        group.task_id,
                        episode_number,
                        completion_number,
                        before,
                        token,
                        float(row.logprobs[place]),
                        row.reward,
                        row.input_ids.tobytes(),
                    )
                    made.proximal = float(first[before].log_softmax(0)[token])
                    if reference is not None:
                        made.reference = float(reference[before].log_softmax(0)[token])
                    found.append(made)
    return found


def together(tokens: Sequence[Token], name: str) -> dict[int, list[Token]]:
    found: dict[int, list[Token]] = {}
    for each in tokens:
        found.setdefault(getattr(each, name), []).append(each)
    return found


def set_advantages(tokens: list[Token], a: Algorithm, has_reference: bool) -> None:
    completions = together(tokens, "completion")
    for members in completions.values():
        for place, each in enumerate(members):
            each.value = each.reward
            if a.overlong_share:
                late = len(members) - (1 - a.overlong_share) * LIMIT
                each.value -= min(1.0, max(0.0, late / (a.overlong_share * LIMIT)))
            if has_reference and a.kl_in != "loss":
                paid = members if a.kl_in == "reward" else members[place:]
                each.value -= a.kl_ctl * sum(other.proximal - other.reference for other in paid)
    mean_of = {number: fmean(each.value for each in members) for number, members in completions.items()}
    home = {number: members[0] for number, members in completions.items()}

    def middle(group: int | None, without: int | None = None) -> float:
        numbers = [
            number
            for number, first in home.items()
            if (group is None or first.group == group) and first.episode != without
        ]
        if without is None:
            return fmean(mean_of[number] for number in numbers)
        by_episode: dict[int, list[float]] = {}
        for number in numbers:
            by_episode.setdefault(home[number].episode, []).append(mean_of[number])
        return fmean(fmean(values) for values in by_episode.values())

    for each in tokens:
        if a.group_baseline == "mean":
            each.advantage = each.value - middle(each.group)
        elif a.group_baseline == "batch":
            each.advantage = each.value - middle(None)
        elif a.group_baseline == "leave_one_out":
            each.advantage = each.value - middle(each.group, each.episode)
        else:
            each.advantage = each.value

    def deviation(members: list[Token], name: str) -> float:
        """Each completion counts once: the mean of its tokens' squares."""
        parts = together(members, "completion").values()
        mean = fmean(fmean(getattr(each, name) for each in part) for part in parts)
        squares = [fmean((getattr(each, name) - mean) ** 2 for each in part) for part in parts]
        return math.sqrt(sum(squares) / (len(squares) - 1))

    if a.adv_norm == "group":
        for members in together(tokens, "group").values():
            scale = deviation(members, "value")
            for each in members:
                each.advantage = each.advantage / (scale + 1e-6) if scale else 0.0
    elif a.adv_norm == "batch":
        scale = deviation(tokens, "advantage")
        for each in tokens:
            each.advantage /= scale + 1e-6


def set_corrections(tokens: list[Token], a: Algorithm) -> None:
    for members in together(tokens, "completion").values():
        logs = [each.proximal - each.behaviour for each in members]
        for each, own in zip(members, logs, strict=True):
            log = {"token": own, "sequence": sum(logs), "geometric": fmean(logs)}[a.correction]
            weight, low, high = math.exp(log), a.behave_imp_weight_floor or 0.0, a.behave_imp_weight_cap or math.inf
            if a.correction_bound == "truncate":
                weight = min(max(weight, low), high)
            elif not low <= weight <= high:
                weight = 0.0
            if a.negative_mask is not None and each.advantage < 0 and -fmean(logs) > a.negative_mask:
                weight = 0.0
            each.correction = weight
    if a.second_moment is not None:
        held = [each for each in tokens if (each.proximal - each.behaviour) * each.advantage > 0]
        held.sort(key=lambda each: abs(each.proximal - each.behaviour))
        total = 0.0
        for count, each in enumerate(held, 1):
            total += (each.proximal - each.behaviour) ** 2
            if total / count > a.second_moment:
                each.correction = 0.0


def objective(a: Algorithm, logp: Tensor, ratio: Tensor, advantage: float) -> Tensor:
    """What is maximised."""
    low, high = 1 - a.eps_clip, 1 + (a.eps_clip if a.eps_clip_higher is None else a.eps_clip_higher)
    inside = torch.tensor(min(max(ratio.item(), low), high), dtype=torch.float64)
    if a.objective == "clip":
        kept = ratio if ratio.item() * advantage <= inside.item() * advantage else inside
        if advantage < 0 and a.dual_clip is not None and kept.item() > a.dual_clip:
            kept = torch.tensor(a.dual_clip, dtype=torch.float64)
        return kept * advantage
    if a.objective == "importance":
        return ratio * advantage
    if a.objective == "cispo":
        return inside * advantage * logp
    if a.objective == "sapo":
        steep = a.sapo_temperature if advantage > 0 else a.sapo_temperature_negative
        return 4 / steep / (1 + torch.exp(-steep * (ratio - 1))) * advantage
    return advantage * logp


def penalty(kind: str, logp: Tensor, each: Token) -> Tensor:
    difference = logp - each.reference
    if kind == "k2":
        return difference**2 / 2
    plain = torch.exp(-difference) - 1 + difference
    return plain if kind == "k3" else torch.exp(logp - each.behaviour) * plain


def written_gradient(
    tokens: list[Token], weights: Tensor, trained: set[bytes], a: Algorithm, *, decoupled: bool, has_reference: bool
) -> Tensor:
    """Of the minibatch that has the groups of the sequences `trained`."""
    groups = {each.group for each in tokens if each.ids in trained}
    table = weights.clone().view(TOKENS, TOKENS).requires_grad_()
    mine = [each for each in tokens if each.group in groups]
    completions, episodes = together(mine, "completion"), together(mine, "episode")
    total = torch.zeros((), dtype=torch.float64)
    for members in completions.values():
        logps = [(table[each.before] - table[each.before].logsumexp(0))[each.token] for each in members]
        logs = [
            logp - (each.proximal if decoupled else each.behaviour) for logp, each in zip(logps, members, strict=True)
        ]
        for each, logp, log in zip(members, logps, logs, strict=True):
            ratio = torch.exp(sum(logs) / len(logs) if a.ratio == "sequence" else log)
            gain = objective(a, logp, ratio, each.advantage) * (each.correction if decoupled else 1.0)
            if has_reference and a.kl_in == "loss":
                gain = gain - a.kl_ctl * penalty(a.kl, logp, each)
            if a.entropy_coef:
                gain = gain - a.entropy_coef * torch.exp(logp - each.behaviour) * logp
            share = {
                "token": 1 / len(mine),
                "completion": 1 / (len(completions) * len(members)),
                "episode": 1 / (len(episodes) * len(episodes[each.episode])),
                "constant": 1 / (len(completions) * a.loss_length),
            }[a.loss_norm]
            total = total - gain * share
    (gradient,) = torch.autograd.grad(total, table)
    return gradient.flatten()


CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in PRESETS if name != "ppo"},
    **{f"{name}+decoupled": {"algorithm": f"{name}+decoupled"} for name in ("grpo", "dr_grpo", "dapo", "gspo")},
    "reinforce++ + decoupled": {"algorithm": "reinforce++", "use_decoupled_loss": True},
    "gspo wide": {"algorithm": "gspo", "eps_clip": 0.3, "eps_clip_higher": 0.4},
    "sapo of sequences": {"algorithm": "sapo", "ratio": "sequence"},
    "cispo decoupled": {"algorithm": "cispo", "use_decoupled_loss": True, "eps_clip": 0.2, "eps_clip_higher": 0.2},
    "rloo scaled": {"algorithm": "rloo", "adv_norm": "group"},
    "rloo decoupled": {"algorithm": "rloo", "use_decoupled_loss": True, "correction_bound": "truncate"},
    "episodes": {"algorithm": "default", "loss_norm": "episode"},
    "k2": {"algorithm": "grpo", "kl": "k2"},
    "k3 corrected": {"algorithm": "grpo", "kl": "k3_corrected"},
    "entropy": {"algorithm": "dapo", "entropy_coef": 0.1},
    "sequence weights, truncated": {
        "algorithm": "decoupled", "correction": "sequence", "correction_bound": "truncate",
        "behave_imp_weight_cap": 1.5, "behave_imp_weight_floor": 0.7,
    },
    "sequence weights, masked": {
        "algorithm": "decoupled", "correction": "sequence", "behave_imp_weight_cap": 3.0, "behave_imp_weight_floor": 0.3
    },
    "geometric weights": {"algorithm": "decoupled", "correction": "geometric", "behave_imp_weight_cap": 1.2},
    "two-sided mask": {"algorithm": "decoupled", "behave_imp_weight_cap": 1.4, "behave_imp_weight_floor": 0.7},
    "negative mask": {"algorithm": "decoupled", "negative_mask": 0.05},
    "second moment with a clip": {"algorithm": "grpo+decoupled", "second_moment": 0.02},
}  # fmt: skip


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_plain_loops(case: str, minibatches: int) -> None:
    groups, policy, reference = make_groups(), TablePolicy(), TablePolicy()
    with torch.no_grad():
        reference.flat += torch.randn(len(reference.flat), generator=torch.Generator().manual_seed(4)).double() / 3
    first = policy.flat.detach().clone()
    actor = ActorConfig(ppo_n_minibatches=minibatches, recompute_logprob=False, **CASES[case])
    a = resolve(actor, reference=True, max_new_tokens=LIMIT).algorithm
    engine = TrainingEngine(
        policy, OptimizerConfig(lr=0.1, warmup_steps=0, gradient_clipping=0), total_steps=10, max_tokens_per_mb=30
    )
    has_reference = a.kl_ctl > 0
    compared = ScoringEngine(reference) if has_reference else None
    PolicyUpdate(engine, actor, compared, seed=1, max_new_tokens=LIMIT).step(groups)
    weights = policy.trained[-1][0]
    last = {span.ids.tobytes() for seen, spans in policy.trained if torch.equal(seen, weights) for span in spans}
    tokens = tokens_of(groups, first.view(TOKENS, TOKENS), reference.flat.detach().view(TOKENS, TOKENS))
    set_advantages(tokens, a, has_reference)
    decoupled = a.use_decoupled_loss
    if decoupled:
        set_corrections(tokens, a)
    expected = written_gradient(tokens, weights, last, a, decoupled=decoupled, has_reference=has_reference)
    assert float(expected.norm()) > 1e-3
    assert float((policy.flat_grad - expected).norm() / expected.norm()) < 1e-6


def test_tokens_that_teach_nothing_do_not_change_the_second_moment() -> None:
    """Else it would depend on whether they are computed, for a penalty, or because of what else is in their rows."""

    def masked(equal_groups: int) -> float:
        equal = [replace(group, episodes=group.episodes[:1]) for group in make_groups(equal_groups)]
        for group in equal:
            group.episodes[0].rows[0].returns[PROMPT:] = 1.0
        engine = TrainingEngine(TablePolicy(), OptimizerConfig(lr=0.1, warmup_steps=0), total_steps=10)
        actor = ActorConfig(algorithm="m2po", recompute_logprob=False)
        return (
            PolicyUpdate(engine, actor, None, seed=1).step([*make_groups(), *equal]).figures["behaviour_weight_masked"]
        )

    assert masked(0) == masked(20) > 0
