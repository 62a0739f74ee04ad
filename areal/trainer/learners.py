"""The models that a run trains, opened as its config says, and the update that trains them.

The same for a run and for whatever takes its steps again from stored batches: this decides nothing that the config and
its arguments do not.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from areal.api.errors import ModelError
from areal.config.experiment import ExperimentConfig, PPOConfig
from areal.config.training import ActorConfig, OptimizerConfig
from areal.engine.inference.grammar import GrammarCompiler
from areal.engine.models import find_model, open_adapted, open_trainable, vocab_size
from areal.engine.sharded.messages import FrozenRole
from areal.engine.training.choices import ChoiceReader
from areal.engine.training.engine import ScoringEngine, TrainableModel, TrainingEngine
from areal.engine.training.learner import Critic, Learner, LogProbs
from areal.engine.training.lora import AdaptedModel, WithoutAdapter
from areal.engine.training.offload import OffloadedScoring
from areal.trainer.cluster import Cluster
from areal.trainer.critic import ValueUpdate
from areal.trainer.ranks import RankedEngine
from areal.trainer.teacher import TeacherUpdate
from areal.trainer.update import PolicyUpdate
from areal.utils.hf_utils import load_hf_tokenizer


def learning_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a config's plain values that decide how a batch is learnt from."""
    of_rollout = {name: values.get("rollout", {}).get(name) for name in ("max_head_offpolicyness", "dtype")}
    if values.get("actor", {}).get("gae_over") == "episode":
        of_rollout["agent"] = {"turn_discount": values["rollout"]["agent"]["turn_discount"]}
    teacher = values.get("teacher") or {}
    taught = {"teacher": teacher} if teacher.get("path") else {}  # so that runs without one have the digest they had
    return {**{name: values.get(name) for name in ("seed", "actor", "critic", "ref")}, **taught, "rollout": of_rollout}


def settings_digest(values: Mapping[str, Any], total_steps: int) -> str:
    """The same for configs that learn alike. A learning rate that falls depends on when the run is to end."""
    settings = learning_settings(values)
    optimizers = [settings[name]["optimizer"] for name in ("actor", "critic") if settings[name]]
    if any(each["lr_scheduler"] != "constant" for each in optimizers):
        settings["total_steps"] = total_steps
    text = json.dumps(settings, sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def threads_of_learner(config: ExperimentConfig) -> int:
    """How many threads each process that trains computes with."""
    return (config.scheduler.threads or 1) if config.actor.backend else torch.get_num_threads()


def open_learner(
    config: ExperimentConfig,
    model: Path,
    optimizer_steps: int,
    cluster: Cluster | None,
    *,
    value_head: bool = False,
) -> Learner:
    """The policy, on the ranks of a cluster or in this process; `optimizer_steps` are those of the whole run.

    With a value head it is a reward model.
    """
    actor = config.actor
    if cluster is not None:
        return RankedEngine(
            cluster,
            actor,
            model,
            total_steps=optimizer_steps,
            threads=threads_of_learner(config),
            value_head=value_head,
            seed=config.seed,
        )
    if actor.lora.rank is None:
        return _open_engine(actor, model, actor.optimizer, optimizer_steps, value_head=value_head)
    adapted = open_adapted(
        model,
        actor.lora,
        name=actor.path,
        seed=config.seed,
        gradient_checkpointing=actor.gradient_checkpointing,
        device=actor.device,
    )
    return _training_engine(actor, adapted, actor.optimizer, optimizer_steps)


def open_critic(config: PPOConfig, engine: Learner, optimizer_steps: int) -> Critic | None:
    """The value model that is trained beside the policy, if the config names one."""
    if not config.critic.path:
        return None
    path = find_model(config.critic.path)
    if isinstance(engine, RankedEngine):
        return engine.open_critic(path, config.critic.optimizer)
    return _open_engine(config.actor, path, config.critic.optimizer, optimizer_steps, value_head=True)


def open_reference(config: PPOConfig, engine: Learner) -> LogProbs | None:
    """The frozen model that the KL penalty compares with, if there is a penalty."""
    actor = config.actor
    if config.algorithm.kl_ctl == 0:
        return None
    return open_frozen(actor, find_model(config.ref.path), engine, "reference", offload=config.ref.offload)


def open_teacher(config: PPOConfig, engine: Learner, *, as_sampled: bool) -> TeacherUpdate | None:
    """The frozen model that the policy is distilled from, if the config names one; `as_sampled` as in `TeacherUpdate`.

    Raises ModelError if the two have different tokens.
    """
    if not config.teacher.path:
        return None
    path, own = find_model(config.teacher.path), find_model(config.actor.path)
    if load_hf_tokenizer(path).get_vocab() != load_hf_tokenizer(own).get_vocab():
        raise ModelError(
            f"a teacher scores the policy's tokens and must have its tokenizer, {config.teacher.path!r} has another "
            f"than {config.actor.path!r}; take a teacher of the same family"
        )
    teacher = open_frozen(config.actor, path, engine, "teacher", offload=config.teacher.offload)
    return TeacherUpdate(teacher, engine, config.teacher, as_sampled=as_sampled)


def open_frozen(
    actor: ActorConfig, path: Path, engine: Learner, role: FrozenRole, *, offload: bool = False
) -> LogProbs:
    """A model that is not trained, computed where the policy is. An adapter's own model is there already.

    `offload`: between two batches its weights are in the host's memory, not in the device's.
    """
    own = actor.lora.rank is not None and path == find_model(actor.path)
    if isinstance(engine, RankedEngine):
        return engine.without_adapter(role) if own else engine.open_frozen(role, path, offload=offload)
    if own:
        assert isinstance(engine, TrainingEngine)
        assert isinstance(engine.model, AdaptedModel)
        return WithoutAdapter(engine.model, max_tokens_per_mb=actor.max_tokens_per_mb, dtype=actor.dtype)
    model = open_trainable(path, device=actor.device, frozen=True)
    scoring = ScoringEngine(model, max_tokens_per_mb=actor.max_tokens_per_mb, dtype=actor.dtype)
    return OffloadedScoring(scoring) if offload and scoring.device.type != "cpu" else scoring


@contextmanager
def opened_frozen(actor: ActorConfig, path: Path, engine: Learner) -> Iterator[LogProbs]:
    """The same, until the end of the block."""
    model = open_frozen(actor, path, engine, "reference")
    try:
        yield model
    finally:
        if isinstance(engine, RankedEngine):
            engine.close_frozen("reference")


def policy_update(
    config: PPOConfig,
    engine: Learner,
    critic: Critic | None,
    *,
    directory: Path | None = None,
    seen_difference: float | None = None,
) -> PolicyUpdate:
    """`directory` and `seen_difference` as in `PolicyUpdate`."""
    discount = config.rollout.agent.turn_discount
    values = None
    if critic is not None:
        values = ValueUpdate(critic, config.critic, config.actor, turn_discount=discount, directory=directory)
    stale_samples = config.rollout.max_head_offpolicyness > 0
    same_arithmetic = config.rollout.dtype == config.actor.dtype == "float32"
    return PolicyUpdate(
        engine,
        config.actor,
        open_reference(config, engine),
        config.seed,
        critic=values,
        teacher=open_teacher(config, engine, as_sampled=same_arithmetic and not stale_samples),
        choices=_choice_reader(find_model(config.actor.path)),
        directory=directory,
        stale_samples=stale_samples,
        seen_difference=seen_difference or 0.0,
        same_arithmetic=same_arithmetic,
        max_new_tokens=config.gconfig.max_new_tokens,
    )


def _choice_reader(model: Path) -> ChoiceReader:
    """It reads the grammars of answers with the tokenizer that the engine had."""
    return ChoiceReader(lambda: GrammarCompiler(load_hf_tokenizer(model), vocab_size(model), trusted=True))


def _open_engine(
    actor: ActorConfig, model: Path, optimizer: OptimizerConfig, optimizer_steps: int, *, value_head: bool = False
) -> TrainingEngine:
    opened = open_trainable(
        model, gradient_checkpointing=actor.gradient_checkpointing, device=actor.device, value_head=value_head
    )
    return _training_engine(actor, opened, optimizer, optimizer_steps)


def _training_engine(
    actor: ActorConfig, model: TrainableModel, optimizer: OptimizerConfig, optimizer_steps: int
) -> TrainingEngine:
    return TrainingEngine(
        model,
        optimizer,
        total_steps=optimizer_steps,
        max_tokens_per_mb=actor.max_tokens_per_mb,
        dtype=actor.dtype,
    )
