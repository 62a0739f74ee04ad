"""Updates with a teacher: what its opinion becomes, which log-probs it is compared with, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from small_runs import make_batch, make_engine
from torch import Tensor

from areal.api.errors import ConfigError
from areal.config.experiment import PPOConfig
from areal.config.presets import resolve
from areal.config.training import ActorConfig, CriticConfig, TeacherConfig
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.trainer.batch import rows_of_groups, token_batch, with_advantages
from areal.trainer.teacher import TeacherUpdate
from areal.trainer.update import PolicyUpdate

pytestmark = pytest.mark.slow


class Counted:
    """A model that counts how often it is asked."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        self.asked = 0

    def logprobs(self, batch: TokenBatch) -> Tensor:
        self.asked += 1
        return self.engine.logprobs(batch)


def advantages(student: Any, as_sampled: bool, **settings: Any) -> tuple[TokenBatch, TeacherUpdate]:
    update = TeacherUpdate(make_engine(5), student, TeacherConfig(path="teacher", **settings), as_sampled=as_sampled)
    batch = rewarded()
    update.teach(batch)
    return batch, update


def rewarded() -> TokenBatch:
    algorithm = resolve(ActorConfig(), stale=False, reference=False, max_new_tokens=512).algorithm
    return with_advantages(token_batch(rows_of_groups(make_batch())), algorithm, 512)


def test_advantage_is_what_the_teacher_finds_likelier_than_the_policy() -> None:
    student = Counted(make_engine(1))
    batch, update = advantages(student, as_sampled=False, weight=2.0)
    own, teacher = make_engine(1).logprobs(batch), make_engine(5).logprobs(batch)
    assert torch.allclose(batch.fields["advantages"], 2 * (teacher - own), atol=1e-5)
    assert torch.equal(batch.fields["proximal"], own)
    assert update.reverse_kl == pytest.approx(float((own - teacher).mean()), abs=1e-5)


def test_samplers_log_probs_are_the_policys_where_it_sampled_with_these_weights() -> None:
    student = Counted(make_engine(1))
    batch, _ = advantages(student, as_sampled=True)
    teacher = make_engine(5).logprobs(batch)
    assert student.asked == 0
    assert "proximal" not in batch.fields
    assert torch.allclose(batch.fields["advantages"], teacher - batch.fields["behaviour"], atol=1e-5)


def test_rewards_count_only_if_they_are_asked_for() -> None:
    plain = rewarded().fields["advantages"]
    taught = advantages(make_engine(1), as_sampled=False)[0].fields["advantages"]
    both = advantages(make_engine(1), as_sampled=False, with_rewards=True)[0].fields["advantages"]
    assert plain.abs().max() > 0
    assert torch.allclose(both, plain + taught, atol=1e-6)


def test_policy_comes_closer_to_what_the_teacher_says_of_its_tokens() -> None:
    engine = make_engine(1, lr=3e-3)
    teacher = TeacherUpdate(make_engine(5), engine, TeacherConfig(path="teacher"), as_sampled=False)
    update = PolicyUpdate(engine, ActorConfig(recompute_logprob=True), None, seed=1, teacher=teacher)
    found = [update.step(make_batch()) for _ in range(8)]
    distances = [np.square(np.concatenate([row.advantages for row in each.rows])).mean() for each in found]
    assert distances[-1] < 0.9 * distances[0]
    assert "teacher_kl" in found[0].figures


def test_teacher_that_teaches_alone_needs_no_group_and_takes_no_critic() -> None:
    teacher = TeacherConfig(path="builtin:tiny-math")
    config = PPOConfig(teacher=teacher)
    config.gconfig.n_samples = 1
    config.__post_init__()
    with pytest.raises(ConfigError, match="teaches alone"):
        PPOConfig(teacher=teacher, critic=CriticConfig(path="builtin:tiny-math"))
    with pytest.raises(ConfigError, match="weight must be > 0"):
        TeacherConfig(weight=0.0)
