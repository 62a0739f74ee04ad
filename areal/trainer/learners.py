"""The models that a run trains, opened as its config says, and the update that trains them.

The same for a run and for whatever takes its steps again from stored batches: this decides nothing that the config and
its arguments do not.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from areal.config.experiment import ExperimentConfig, PPOConfig
from areal.config.training import ActorConfig, OptimizerConfig
from areal.engine.models import find_model, open_trainable
from areal.engine.training.engine import ScoringEngine, TrainingEngine
from areal.engine.training.learner import Critic, Learner, LogProbs
from areal.trainer.cluster import Cluster
from areal.trainer.critic import ValueUpdate
from areal.trainer.ranks import RankedEngine
from areal.trainer.update import PolicyUpdate


def learning_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a config's plain values that decide how a batch is learnt from."""
    of_rollout = {name: values.get("rollout", {}).get(name) for name in ("max_head_offpolicyness", "dtype")}
    return {**{name: values.get(name) for name in ("seed", "actor", "critic", "ref")}, "rollout": of_rollout}


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


def open_learner(config: ExperimentConfig, model: Path, optimizer_steps: int, cluster: Cluster | None) -> Learner:
    """The policy, on the ranks of a cluster or in this process; `optimizer_steps` are those of the whole run."""
    if cluster is None:
        return _open_engine(config.actor, model, config.actor.optimizer, optimizer_steps)
    threads = threads_of_learner(config)
    return RankedEngine(cluster, config.actor, model, total_steps=optimizer_steps, threads=threads)


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
    if actor.kl_ctl == 0:
        return None
    path = find_model(config.ref.path)
    if isinstance(engine, RankedEngine):
        return engine.open_reference(path)
    model = open_trainable(path, device=actor.device, frozen=True)
    return ScoringEngine(model, max_tokens_per_mb=actor.max_tokens_per_mb, dtype=actor.dtype)


def policy_update(
    config: PPOConfig,
    engine: Learner,
    critic: Critic | None,
    *,
    directory: Path | None = None,
    seen_difference: float | None = None,
) -> PolicyUpdate:
    """`directory` and `seen_difference` as in `PolicyUpdate`."""
    values = None if critic is None else ValueUpdate(critic, config.critic, config.actor, directory=directory)
    return PolicyUpdate(
        engine,
        config.actor,
        open_reference(config, engine),
        config.seed,
        critic=values,
        directory=directory,
        stale_samples=config.rollout.max_head_offpolicyness > 0,
        seen_difference=seen_difference or 0.0,
        same_arithmetic=config.rollout.dtype == config.actor.dtype == "float32",
    )


def _open_engine(
    actor: ActorConfig, model: Path, optimizer: OptimizerConfig, optimizer_steps: int, *, value_head: bool = False
) -> TrainingEngine:
    return TrainingEngine(
        open_trainable(
            model,
            gradient_checkpointing=actor.gradient_checkpointing,
            device=actor.device,
            value_head=value_head,
        ),
        optimizer,
        total_steps=optimizer_steps,
        max_tokens_per_mb=actor.max_tokens_per_mb,
        dtype=actor.dtype,
    )
