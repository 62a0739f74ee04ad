"""Updates with a critic: what is compared with its values, what it learns itself, and what a checkpoint keeps of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import (
    branching_tree,
    byte_tokenizer,
    group_of,
    make_batch,
    make_config,
    make_engine,
    make_group,
    make_token_batch,
)
from table_models import TablePass, passes_of
from torch import Tensor

from areal.api.errors import ArealError, NonFiniteUpdate, RunExists
from areal.api.messages import Episode, GroupResult
from areal.config.training import ActorConfig, CriticConfig, OptimizerConfig
from areal.engine.training.engine import Loss, TokenBatch, TrainingEngine
from areal.engine.training.figures import Figures
from areal.engine.training.head import Temperatures
from areal.engine.training.packing import Span
from areal.engine.training.token_sets import DrawnFrom
from areal.trainer.batch import rows_of_groups, token_batch
from areal.trainer.checkpoint import DamagedCheckpoint, load_checkpoint, save_checkpoint
from areal.trainer.critic import ValueUpdate
from areal.trainer.ppo import PPOTraining
from areal.trainer.run import TrainingWork
from areal.trainer.update import PolicyUpdate
from areal.trajectory import export, nodes_of

pytestmark = pytest.mark.slow


def make_critic(seed: int = 2, **optimizer: Any) -> TrainingEngine:
    return make_engine(seed, value_head=True, **optimizer)


def make_actor(**settings: Any) -> ActorConfig:
    return ActorConfig(group_baseline="none", **settings)


def make_update(
    engine: TrainingEngine, critic: Any, config: CriticConfig | None = None, directory: Path | None = None, **actor: Any
) -> PolicyUpdate:
    settings = make_actor(**actor)
    values = ValueUpdate(critic, config or CriticConfig(), settings, directory=directory)
    return PolicyUpdate(engine, settings, None, seed=1, critic=values, directory=directory)


@dataclass
class WatchedCritic:
    """A critic that keeps what it was trained on."""

    engine: TrainingEngine

    def __post_init__(self) -> None:
        self.batches: list[TokenBatch] = []

    def values(self, batch: TokenBatch) -> Tensor:
        return self.engine.values(batch)

    def train_batch(
        self,
        batch: TokenBatch,
        loss: Loss,
        place: int | None = None,
        *,
        scores: Tensor | None = None,
        entropies: Tensor | None = None,
    ) -> Figures:
        self.batches.append(batch)
        return self.engine.train_batch(batch, loss, place, scores=scores, entropies=entropies)

    def begin_checkpoint(self, directory: Path) -> Callable[[], None] | None:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_checkpoint(self, directory: Path, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_advantage_is_the_return_minus_the_value_and_the_target_the_return() -> None:
    critic, actor = make_critic(), make_actor()
    batch = make_token_batch(make_batch(), actor, ValueUpdate(critic, CriticConfig(), actor))
    returns = np.concatenate([each.row.returns[each.row.loss_mask] for each in rows_of_groups(make_batch())])
    values = critic.values(batch)
    assert float(values.std()) > 0.1
    torch.testing.assert_close(batch.fields["advantages"], torch.from_numpy(returns) - values)
    torch.testing.assert_close(batch.fields["targets"], torch.from_numpy(returns))
    assert torch.equal(batch.fields["old_values"], values)


@pytest.mark.parametrize("style", ["individual", "concat"])
def test_estimates_go_from_turn_to_turn_where_they_are_asked_to(style: Any) -> None:
    """An answer with two continuations, which alone are rewarded."""
    tree, critic, actor = branching_tree(), make_critic(), make_actor(gae_over="episode", gae_lambda=0.0)
    talk = Episode(export(tree, style, turn_discount=0.9), tree.reward, nodes=nodes_of(tree))
    groups = [make_group(0, [1.0, 0.0]), GroupResult(1, [talk], [], {})]
    batch = token_batch(rows_of_groups(groups))
    values, completions = critic.values(batch), batch.fields["completions"]
    update = ValueUpdate(critic, CriticConfig(), actor, turn_discount=0.9)
    result = PolicyUpdate(make_engine(), actor, None, seed=1, critic=update).step(groups)
    advantages = torch.from_numpy(np.concatenate([row.advantages for row in result.rows]))
    before, *after = (torch.nonzero(completions == number).flatten() for number in (2, 3, 4))
    expected = 0.9 * float(torch.stack([values[places[0]] for places in after]).mean()) - float(values[before[-1]])
    assert float(advantages[before[-1]]) == pytest.approx(expected, abs=1e-5)
    for places, reward in zip(after, (1.0, -0.5), strict=True):
        assert float(advantages[places[-1]]) == pytest.approx(reward - float(values[places[-1]]), abs=1e-5)


def test_turns_that_nobody_knows_are_refused_with_the_remedy() -> None:
    groups = [group_of(branching_tree(), "concat")]
    with pytest.raises(ArealError, match=r"an episode of 3 completions .* set actor\.gae_over=completion"):
        make_update(make_engine(), make_critic(), gae_over="episode").step(groups)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_advantages_are_normalised_as_others_are(norm: Any) -> None:
    def advantages(**settings: Any) -> Tensor:
        actor = make_actor(**settings)
        value = ValueUpdate(make_critic(), CriticConfig(), actor)
        return make_token_batch(make_batch(), actor, value).fields["advantages"]

    plain, scaled = advantages(gae_lambda=0.9), advantages(gae_lambda=0.9, adv_norm=norm)
    ratio = scaled / plain
    assert float(ratio.min()) > 0
    assert len({round(each, 3) for each in ratio.tolist()}) == (1 if norm == "batch" else len(make_batch()))


def test_every_minibatch_has_the_values_of_the_weights_before_the_first() -> None:
    critic = WatchedCritic(make_critic())
    whole = make_token_batch(make_batch(), make_actor(), ValueUpdate(make_critic(), CriticConfig(), make_actor()))
    known = {span.ids.tobytes(): part for span, part in zip(whole.spans, split(whole, "old_values"), strict=True)}
    make_update(make_engine(), critic, ppo_n_minibatches=3).step(make_batch())
    assert len(critic.batches) == 3
    for batch in critic.batches:
        assert float(batch.fields["weights"].sum()) == pytest.approx(1)
        for span, values in zip(batch.spans, split(batch, "old_values"), strict=True):
            torch.testing.assert_close(values, known.pop(span.ids.tobytes()))
    assert not known


def split(batch: TokenBatch, name: str) -> tuple[Tensor, ...]:
    return batch.fields[name].split([len(span.asked) for span in batch.spans])


def test_critic_learns_from_what_teaches_the_policy_nothing() -> None:
    """Where nothing is expected and nothing comes, advantages are 0."""
    critic = WatchedCritic(make_critic())
    with torch.no_grad():
        critic.engine.decoder.parameters["value_head"].zero_()
    groups = [make_group(0, [0, 0]), make_group(1, [1, 0])]
    engine = make_engine()
    figures = make_update(engine, critic).step(groups).figures
    (batch,) = critic.batches
    assert len(batch.spans) == 4
    assert figures["trained_tokens"] == len(groups[1].episodes[0].rows[0].loss_mask) - 5


def test_only_the_critic_learns_during_its_warmup() -> None:
    engine, critic = make_engine(), make_critic()
    update = make_update(engine, critic, CriticConfig(warmup_steps=2))
    policy = engine.flat.clone()
    for step in range(3):
        values = critic.flat.clone()
        result = update.step(make_batch(seed=step))
        figures = result.figures
        assert not torch.equal(critic.flat, values)
        assert torch.equal(engine.flat, policy) == (step < 2)
        assert (figures["grad_norm"] > 0) == (step == 2)
        assert all(np.isfinite(row.advantages).all() for row in result.rows)
        assert any(np.isfinite(row.logprobs).any() for row in result.rows) == (step == 2)
    assert engine.version == 3


def test_figures_tell_what_the_critic_knows() -> None:
    """The same batch again and again: it ends with knowing which completion gets what."""
    update = make_update(make_engine(), make_critic(lr=3e-3, warmup_steps=0), CriticConfig(eps_clip=0.5))
    seen = [update.step(make_batch()).figures for _ in range(60)]
    assert seen[0]["critic/explained_variance"] < 0.1
    assert seen[-1]["critic/explained_variance"] > 0.8
    assert seen[-1]["critic/loss"] < 0.2 * seen[0]["critic/loss"]
    assert seen[0]["critic/clip_ratio"] == 0  # before the step, no value has moved
    assert {"critic/grad_norm", "critic/lr", "critic/forward_tokens", "critic/skipped_updates"} < seen[0].keys()
    equal = make_update(make_engine(), make_critic()).step([make_group(0, [1, 1])]).figures
    assert "critic/explained_variance" not in equal


def test_critics_update_that_is_not_finite_stops_before_the_policy_changes(tmp_path: Path) -> None:
    engine, critic = make_engine(), make_critic()
    groups = make_batch()
    groups[0].episodes[0].rows[0].returns[:] = np.nan
    weights, values = engine.flat.clone(), critic.flat.clone()
    with pytest.raises(NonFiniteUpdate) as caught:
        make_update(engine, critic, directory=tmp_path).step(groups)
    file = tmp_path / "nonfinite-critic-step-000001.npz"
    assert str(caught.value).startswith("step 1, critic: the loss and the gradient norm must be finite, got nan and ")
    assert f"its batch is saved in {file}" in str(caught.value)
    with np.load(file) as saved:
        assert np.isnan(saved["targets"]).any()
    assert torch.equal(engine.flat, weights)
    assert torch.equal(critic.flat, values)
    figures = make_update(engine, critic, on_nonfinite="skip").step(groups).figures
    assert figures["critic/skipped_updates"] == 1
    assert torch.equal(critic.flat, values)


TOKENS = 7


class TableCritic:
    """The value before a token is an entry of a table, chosen by the token before. Implements `TrainableModel`."""

    def __init__(self) -> None:
        self.flat = torch.randn(TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.flat_grad = torch.zeros_like(self.flat)
        self.matrices = TOKENS
        self._table = self.flat.view(TOKENS).requires_grad_()
        self._table.grad = self.flat_grad

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterator[TablePass]:
        return passes_of(spans)

    def scores(
        self,
        part: TablePass,
        temperatures: Temperatures,
        drawn: DrawnFrom | None = None,
        entropies: Tensor | None = None,
    ) -> Tensor:
        before = np.concatenate([span.ids[span.asked - 1] for span in part.spans])
        return self._table[torch.from_numpy(before).long()]


@pytest.mark.parametrize("eps_clip", [None, 0.4])
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (1.0, 0.0), (0.8, 0.6)])
def test_gradients_of_the_critic_are_those_written_down_token_by_token(
    discount: float, gae_lambda: float, eps_clip: float | None
) -> None:
    """Two steps of plain descent on one batch; in the second, values have moved since the batch was valued."""
    groups = table_groups()
    model = TableCritic()
    descent = OptimizerConfig(lr=1e6, eps=1e6, beta1=0.0, beta2=0.0, warmup_steps=0, gradient_clipping=0.0)
    critic: Any = TrainingEngine(model, descent, total_steps=10)  # type: ignore[arg-type]
    actor = make_actor(discount=discount, gae_lambda=gae_lambda)
    update = ValueUpdate(critic, CriticConfig(eps_clip=eps_clip), actor)
    first = model.flat.detach().tolist()
    batch = make_token_batch(groups, actor, update)
    present = list(first)
    for step in range(2):
        update.train(batch, place=step, step=1)
        gradient = by_hand(groups, first, present, discount, gae_lambda, eps_clip)
        assert model.flat_grad.tolist() == pytest.approx(gradient, abs=1e-6)
        present = [value - each for value, each in zip(present, gradient, strict=True)]
    assert max(abs(each) for each in gradient) > 1e-2


def table_groups() -> list[GroupResult]:
    groups = make_batch(seed=4)
    for each in rows_of_groups(groups):
        each.row.input_ids %= TOKENS
    return groups


def by_hand(
    groups: list[GroupResult],
    first: list[float],
    present: list[float],
    discount: float,
    gae_lambda: float,
    eps_clip: float | None,
) -> list[float]:
    """The gradient of the mean over tokens of half the squared error, without any tensor."""
    gradient, count = [0.0] * TOKENS, 0
    for row in (row for group in groups for episode in group.episodes for row in episode.rows):
        places = [int(place) for place in np.flatnonzero(row.loss_mask)]
        advantage, value_after = 0.0, None
        for place in reversed(places):
            before = int(row.input_ids[place - 1])
            old = first[before]
            surprise = row.reward - old if value_after is None else discount * value_after - old
            advantage = surprise + discount * gae_lambda * advantage
            value_after = old
            target, value, count = old + advantage, present[before], count + 1
            error = value - target
            if eps_clip is not None and abs(value - old) > eps_clip:
                held = old + eps_clip if value > old else old - eps_clip
                error = 0.0 if (held - target) ** 2 > error**2 else error
            gradient[before] += error
    return [each / count for each in gradient]


def test_two_steps_a_restart_and_two_more_are_four_steps(tmp_path: Path) -> None:
    def train(engine: TrainingEngine, critic: TrainingEngine, steps: range) -> None:
        update = make_update(engine, critic, ppo_n_minibatches=2, gae_lambda=0.9, recompute_logprob=False)
        for step in steps:
            update.step(make_batch(seed=step))

    straight = make_engine(), make_critic()
    train(*straight, range(4))
    engine, critic = make_engine(), make_critic()
    train(engine, critic, range(2))
    save_checkpoint(tmp_path / "step-000002", engine, byte_tokenizer(), {"step": 2}, critic)
    resumed = make_engine(seed=8), make_critic(seed=9)
    assert load_checkpoint(tmp_path / "step-000002", *resumed) == {"step": 2}
    train(*resumed, range(2, 4))
    for found, expected in zip(resumed, straight, strict=True):
        assert torch.equal(found.flat, expected.flat)


def test_damage_to_the_critic_is_found(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", make_engine(), byte_tokenizer(), {"step": 1}, make_critic())
    file = tmp_path / "one/critic/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"the bytes of critic/model.safetensors have changed since it was"):
        load_checkpoint(tmp_path / "one", make_engine(), make_critic())


def open_run(output_dir: Path, tiny_math: Path, *, critic: bool, kept: bool = True, mode: Any = "auto") -> Any:
    """Open a run as its trainer does and save a checkpoint; `kept` = it says whether there was a critic."""
    config = make_config(output_dir)
    config.actor.path, config.actor.group_baseline = str(tiny_math), "none"
    config.critic.path = str(tiny_math) if critic else ""
    config.recover.mode = mode
    with PPOTraining(config, [{"messages": []}], []) as training, TrainingWork._open_run(training, 10) as parts:
        fingerprint = {k: v for k, v in parts.fingerprint.items() if kept or k != "critic.path"}
        state = {"step": parts.standing.saved_step + 1, "fingerprint": fingerprint}
        target = parts.directory.checkpoint(state["step"])
        save_checkpoint(target, parts.engine, parts.tokenizer, state, parts.critic)
        assert (target / "critic").exists() == critic
        return state["step"]


@pytest.mark.parametrize(("before", "after", "kept"), [(False, True, True), (False, True, False), (True, False, True)])
def test_run_goes_on_with_a_critic_or_without_as_it_began(
    tmp_path: Path, tiny_math: Path, before: bool, after: bool, kept: bool
) -> None:
    open_run(tmp_path, tiny_math, critic=before, kept=kept)
    assert open_run(tmp_path, tiny_math, critic=before) == 2
    with pytest.raises(RunExists, match=r"critic.path was .*, is .*; give the old values, choose another trial_name"):
        open_run(tmp_path, tiny_math, critic=after)
    assert open_run(tmp_path, tiny_math, critic=after, mode="force") == 3
