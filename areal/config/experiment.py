"""A whole experiment, as `--config FILE` fills it, and the datasets it names.

Settings that are wrong only in combination are refused here, with the remedy.
"""

from dataclasses import dataclass, field

from areal.config.errors import require
from areal.config.rollout import GenerationHyperparameters, ProxyConfig, RolloutConfig
from areal.config.training import (
    ActorConfig,
    CriticConfig,
    EvaluatorConfig,
    MetricsConfig,
    OptimizerConfig,
    RecoverConfig,
    ReferenceConfig,
    SaverConfig,
    SchedulerConfig,
    StoreConfig,
    ViewerConfig,
)


@dataclass
class DatasetConfig:
    """Where tasks come from, and how many make a step."""

    path: str = ""
    """`builtin:NAME`, a .jsonl or .parquet file with a task per row, a directory of such files or one that
    `save_to_disk` wrote; empty = none."""
    split: str = ""
    """Split of a built-in task or of a directory; empty = train for train_dataset, test for valid_dataset."""
    size: int | None = None
    """Use only this many tasks; None = all."""
    batch_size: int = 32
    """Tasks per training step (each runs gconfig.n_samples episodes)."""
    shuffle: bool = True
    """Take the tasks in a new random order in each epoch."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be >= 1, got {self.batch_size}")
        require(self.size is None or self.size >= 1, f"size must be >= 1, got {self.size}; leave it out for all")


@dataclass
class ExperimentConfig:
    """What every kind of training needs."""

    experiment_name: str = "experiment"
    """Groups the runs of one experiment in a directory."""
    trial_name: str | None = None
    """Name of this run; None = a new one made from the time. The name of an unfinished run resumes it."""
    output_dir: str = "runs"
    """The run directory is output_dir/experiment_name/trial_name."""
    seed: int = 1
    """Decides the order of tasks and minibatches, and with the task, the sample and the call what each call draws."""
    total_train_steps: int | None = None
    """Stop after this many steps; None = total_train_epochs decides."""
    total_train_epochs: int = 1
    """Passes over train_dataset."""
    tokenizer_path: str = ""
    """Empty = the actor's own; a loaded config then has actor.path here."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The model that is trained."""
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """Tasks to train on."""
    valid_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """Tasks to evaluate on; without a path there is no evaluation."""
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    """When to evaluate."""
    saver: SaverConfig = field(default_factory=SaverConfig)
    """When to write checkpoints."""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Whether to resume."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """What is kept of the run."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Where processes run."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """What is shown to Prometheus."""
    viewer: ViewerConfig = field(default_factory=ViewerConfig)
    """Whether it is shown in a browser meanwhile."""

    def __post_init__(self) -> None:
        for name in ("experiment_name", "trial_name"):
            value = getattr(self, name)
            if value is not None:
                require(
                    value not in ("", ".", "..") and "/" not in value,
                    f"{name} must be a plain directory name, got {value!r}",
                )
        require(
            self.total_train_steps is None or self.total_train_steps >= 1,
            f"total_train_steps must be >= 1, got {self.total_train_steps}",
        )
        require(self.total_train_epochs >= 1, f"total_train_epochs must be >= 1, got {self.total_train_epochs}")


@dataclass
class PPOConfig(ExperimentConfig):
    """Policy-gradient training of an agent's model."""

    workflow: str = ""
    """Import string of the agent or workflow, for `areal train`; a script passes its own to trainer.train()."""
    reward_fn: str = ""
    """Import string of the reward function, for workflows whose constructor takes one and was given none."""
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """How completions are sampled."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How episodes run."""
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    """What agents call the model through."""
    ref: ReferenceConfig = field(default_factory=ReferenceConfig)
    """What the KL penalty compares with."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """What advantages are taken against, if not the group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.actor.kl_ctl == 0 or self.ref.path != "",
            f"actor.kl_ctl={self.actor.kl_ctl} needs a reference model; "
            f"set ref.path (usually {self.actor.path}) or actor.kl_ctl=0",
        )
        require(
            self.gconfig.seed is None,
            f"gconfig.seed must be empty in training, got {self.gconfig.seed}: it would make all samples of a task "
            "equal, and nothing would be learnt; leave it out and set seed, from which every call gets its own",
        )
        require(
            self.actor.adv_norm != "group" or self.gconfig.n_samples > 1,
            "actor.adv_norm=group needs gconfig.n_samples > 1, got 1; one sample has no spread",
        )
        self._check_baseline()
        self._check_stale()
        require(
            self.actor.ppo_n_minibatches <= self.train_dataset.batch_size,
            f"actor.ppo_n_minibatches={self.actor.ppo_n_minibatches} exceeds "
            f"train_dataset.batch_size={self.train_dataset.batch_size}; a minibatch needs at least one group",
        )

    def _check_stale(self) -> None:
        """Only the decoupled loss, chosen or implied, weighs samples of any age rightly."""
        actor, rollout = self.actor, self.rollout
        same_arithmetic = rollout.dtype == actor.dtype == "float32"
        recomputes = actor.recompute_logprob is True or (actor.recompute_logprob == "auto" and not same_arithmetic)
        require(
            rollout.when_stale != "train" or actor.use_decoupled_loss or recomputes,
            "rollout.when_stale=train trains samples of any age, which needs the decoupled loss, got "
            "actor.use_decoupled_loss=false; set it to true, or rollout.when_stale to wait or drop",
        )

    def _check_baseline(self) -> None:
        """A return is compared with a value or with its group, never with both."""
        if self.critic.path:
            require(
                self.actor.group_baseline == "none",
                f"critic.path={self.critic.path} takes advantages against values, and actor.group_baseline="
                f"{self.actor.group_baseline} against the group; set actor.group_baseline=none",
            )
            return
        require(
            self.actor.group_baseline != "mean" or self.gconfig.n_samples > 1,
            "actor.group_baseline=mean with gconfig.n_samples=1 makes every advantage 0; "
            "set gconfig.n_samples > 1 or actor.group_baseline=none",
        )
        for name in ("gae_lambda", "discount"):
            value = getattr(self.actor, name)
            require(
                value == 1,
                f"actor.{name}={value} needs a critic; set critic.path (usually {self.actor.path}) or leave it out",
            )


@dataclass
class GRPOConfig(PPOConfig):
    """PPOConfig with GRPO's group sampling as the default."""

    gconfig: GenerationHyperparameters = field(default_factory=lambda: GenerationHyperparameters(n_samples=8))


@dataclass
class SFTConfig(ExperimentConfig):
    """Supervised fine-tuning on conversations."""

    actor: ActorConfig = field(default_factory=lambda: ActorConfig(optimizer=OptimizerConfig(lr=1e-3)))
