"""The gradient of an update against one written down token by token, on a policy that is a table, in double precision.

The reference shares no code with the package: it reads rows, computes its own statistics, log-probs and objective, and
leaves the gradient to autograd.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from table_models import TablePass, passes_of
from torch import Tensor

from areal.api.messages import Episode, GroupResult, Row
from areal.config.training import ActorConfig, OptimizerConfig
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.head import Temperatures
from areal.engine.training.packing import Span
from areal.engine.training.token_sets import DrawnFrom
from areal.trainer.update import PolicyUpdate

TOKENS = 7
PROMPT = 2
LOW, HIGH, CAP, DUAL = 0.2, 0.28, 2.0, 3.0


class TablePolicy:
    """The next token's logits are a row of a table, chosen by the token before. Implements `TrainableModel`."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.flat = torch.randn(TOKENS * TOKENS, generator=generator, dtype=torch.float64)
        self.flat_grad = torch.zeros_like(self.flat)
        self.matrices = len(self.flat)
        self._table = self.flat.view(TOKENS, TOKENS).requires_grad_()
        self._table.grad = self.flat_grad.view(TOKENS, TOKENS)
        self.trained: list[tuple[Tensor, list[Span]]] = []
        """The weights and the sequences of every pass whose gradient was taken."""

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterator[TablePass]:
        return passes_of(spans)

    def scores(
        self,
        part: TablePass,
        temperatures: Temperatures,
        drawn: DrawnFrom | None = None,
        entropies: Tensor | None = None,
    ) -> Tensor:
        if torch.is_grad_enabled():
            self.trained.append((self.flat.detach().clone(), part.spans))
        before = np.concatenate([span.ids[span.asked - 1] for span in part.spans])
        sampled = np.concatenate([span.ids[span.asked] for span in part.spans])
        logits = self._table[torch.from_numpy(before).long()] / torch.as_tensor(temperatures).reshape(-1, 1)
        return logits.log_softmax(1).gather(1, torch.from_numpy(sampled).long()[:, None]).squeeze(1)

    def load(self, directory: Path) -> None:
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        raise NotImplementedError


def make_groups(unreported: Sequence[int] = (), groups: int = 4, members: int = 4) -> list[GroupResult]:
    """Samples of an older policy: log-probs that differ from the table's, some so much that a clip or cap holds."""
    draw = np.random.default_rng(5)
    policy = TablePolicy()
    table = policy.flat.view(TOKENS, TOKENS).log_softmax(1).detach().numpy()
    made = []
    for number in range(groups):
        episodes = []
        for member in range(members):
            length = PROMPT + int(draw.integers(2, 8))
            ids = draw.integers(0, TOKENS, length).astype(np.int32)
            mask = np.arange(length) >= PROMPT
            own = np.r_[0.0, table[ids[:-1], ids[1:]]] + draw.normal(0.0, 0.8, length)
            reward = float((number + member) % 3)
            hidden = member in unreported
            row = Row(
                input_ids=ids,
                loss_mask=mask,
                logprobs=np.where(mask & (not hidden), own, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                returns=np.where(mask, reward, 0.0).astype(np.float32),
                completion_index=np.where(mask, 0, -1).astype(np.int32),
                temperatures=np.ones(length, np.float32),
                reward=reward,
                recompute_logprobs=hidden,
            )
            episodes.append(Episode([row], reward))
        made.append(GroupResult(number, episodes, [], {}))
    return made


def reference_gradient(
    groups: list[GroupResult],
    weights: Tensor,
    first_weights: Tensor,
    trained_ids: set[bytes],
    *,
    clip_around: str,
    weigh_by_behaviour: bool,
) -> Tensor:
    """Of the groups with a sequence in `trained_ids`, at `weights`; `first_weights` are those before the first
    minibatch.

    `clip_around`: sampler or proximal, whose log-probs the ratio is taken against.
    """
    table = weights.clone().view(TOKENS, TOKENS).requires_grad_()
    first = first_weights.view(TOKENS, TOKENS)
    losses: list[Tensor] = []
    for group in groups:
        rows = [row for episode in group.episodes for row in episode.rows]
        if trained_ids.isdisjoint(row.input_ids.tobytes() for row in rows):
            continue
        for row in rows:
            advantage = row.reward - sum(each.reward for each in rows) / len(rows)
            for place in np.flatnonzero(row.loss_mask):
                before, token = int(row.input_ids[place - 1]), int(row.input_ids[place])
                present = (table[before] - table[before].logsumexp(0))[token]
                proximal = float((first[before] - first[before].logsumexp(0))[token])
                sampler = proximal if row.recompute_logprobs else float(row.logprobs[place])
                ratio = torch.exp(present - (proximal if clip_around == "proximal" else sampler))
                if advantage >= 0:
                    bounded = ratio if ratio.item() < 1 + HIGH else torch.tensor(1 + HIGH, dtype=torch.float64)
                else:
                    inside = min(max(ratio.item(), 1 - LOW), DUAL)
                    bounded = ratio if inside == ratio.item() else torch.tensor(inside, dtype=torch.float64)
                weight = math.exp(proximal - sampler) if weigh_by_behaviour else 1.0
                losses.append(-bounded * advantage * (weight if weight <= CAP else 0.0))
    total = sum(losses) / len(losses)
    (gradient,) = torch.autograd.grad(total, table, allow_unused=True)
    return gradient.flatten()


CASES: dict[str, tuple[dict[str, Any], bool, str, bool]] = {
    # settings, samples may be stale, what the ratio is clipped around, whether the behaviour weighs
    "plain": ({"recompute_logprob": False, "use_decoupled_loss": False}, True, "sampler", False),
    "plain, recomputed, on-policy": ({"recompute_logprob": True}, False, "proximal", False),
    "plain, recomputed, stale": ({"recompute_logprob": True, "use_decoupled_loss": False}, True, "proximal", True),
    "decoupled": ({"recompute_logprob": False, "use_decoupled_loss": True}, True, "proximal", True),
    "decoupled, recomputed": ({"recompute_logprob": True, "use_decoupled_loss": True}, True, "proximal", True),
    "decoupled, recomputed, on-policy": (
        {"recompute_logprob": True, "use_decoupled_loss": True},
        False,
        "proximal",
        True,
    ),
}


@pytest.mark.parametrize("unreported", [(), (1, 2), (0, 1, 2, 3)], ids=["reported", "mixed", "unreported"])
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_the_written_objective(case: str, minibatches: int, unreported: tuple[int, ...]) -> None:
    settings, stale, clip_around, weigh = CASES[case]
    groups, policy = make_groups(unreported), TablePolicy()
    first_weights = policy.flat.detach().clone()
    optimizer = OptimizerConfig(lr=0.3, warmup_steps=0, gradient_clipping=0)
    engine = TrainingEngine(policy, optimizer, total_steps=10)
    actor = ActorConfig(
        eps_clip=LOW,
        eps_clip_higher=HIGH,
        behave_imp_weight_cap=CAP,
        dual_clip=DUAL,
        ppo_n_minibatches=minibatches,
        **settings,
    )
    PolicyUpdate(engine, actor, None, seed=1, stale_samples=stale).step(groups)
    # The gradient that is left is that of the last minibatch, at the weights that the others had changed.
    weights = policy.trained[-1][0]
    last = {span.ids.tobytes() for seen, spans in policy.trained if torch.equal(seen, weights) for span in spans}
    assert torch.equal(weights, first_weights) == (minibatches == 1)
    expected = reference_gradient(
        groups, weights, first_weights, last, clip_around=clip_around, weigh_by_behaviour=weigh
    )
    assert float(expected.norm()) > 1e-3
    assert float((policy.flat_grad - expected).norm() / expected.norm()) < 1e-6
