"""A whole experiment, as `--config FILE` fills it, and the datasets it names.

Settings that are wrong only in combination are refused here, with the remedy.
"""

import math
from dataclasses import dataclass, field

from areal.config.algorithm import Algorithm
from areal.config.backend import VLLM_CHOICES, VLLM_RANKS, Backend
from areal.config.errors import ConfigError, require
from areal.config.presets import DECOUPLED, DEFAULTS, Resolved, resolve
from areal.config.rollout import GenerationHyperparameters, ProxyConfig, RolloutConfig
from areal.config.training import (
    TRACKERS,
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
    TeacherConfig,
    TrackingConfig,
    ViewerConfig,
)


@dataclass
class DatasetConfig:
    """Where tasks come from, and how many make a step."""

    path: str = ""
    """`builtin:NAME`, `reasoning-gym:NAME`, `verifiers:ID`, `harbor:DIRECTORY`, a .jsonl or .parquet file with a task
    per row, a directory of such files or one that `save_to_disk` wrote, or a hub id such as `openai/gsm8k:main`; empty
    = none."""
    split: str = ""
    """Split of a built-in task, a directory or a hub id (there also `train[:90%]`); empty = train for train_dataset,
    test for valid_dataset."""
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
    tracker: str = ""
    """Where figures are sent besides the run's directory: wandb, mlflow, trackio or swanlab, or several with commas
    between; empty = nowhere."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """What trackers are told."""
    viewer: ViewerConfig = field(default_factory=ViewerConfig)
    """Whether it is shown in a browser meanwhile."""
    quiet: bool = False
    """Print only warnings, errors and, at the end, the result and where it is; `areal train --quiet` sets it."""

    def total_steps(self, tasks: int) -> int:
        """Of a run with so many tasks."""
        return self.total_train_steps or max(1, self.total_train_epochs * tasks // self.train_dataset.batch_size)

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
        for name in self.trackers:
            require(name in TRACKERS, f"tracker must be one of {', '.join(TRACKERS)}, got {name!r}")
        require(self.total_train_epochs >= 1, f"total_train_epochs must be >= 1, got {self.total_train_epochs}")

    @property
    def trackers(self) -> list[str]:
        """By name, each once."""
        return list(dict.fromkeys(name.strip() for name in self.tracker.split(",") if name.strip()))


@dataclass
class PPOConfig(ExperimentConfig):
    """Policy-gradient training of an agent's model."""

    workflow: str = ""
    """Import string of the agent or workflow, for `areal train`; a script passes its own to trainer.train()."""
    reward_fn: str = ""
    """Import string of the reward function, or `model:DIRECTORY` of a reward model, for workflows whose constructor
    takes one and was given none."""
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
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """What the policy is distilled from, if it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_algorithm(self.algorithm)
        self._check_adapter()
        require(
            self.gconfig.seed is None,
            f"gconfig.seed must be empty in training, got {self.gconfig.seed}: it would make all samples of a task "
            "equal, and nothing would be learnt; leave it out and set seed, from which every call gets its own",
        )
        self._check_sampling()
        require(
            self.actor.ppo_n_minibatches <= self.train_dataset.batch_size,
            f"actor.ppo_n_minibatches={self.actor.ppo_n_minibatches} exceeds "
            f"train_dataset.batch_size={self.train_dataset.batch_size}; a minibatch needs at least one group",
        )

    @property
    def resolved(self) -> Resolved:
        """The algorithm that the actor's settings and its preset make, and where each value comes from."""
        try:
            return resolve(
                self.actor,
                stale=self.rollout.max_head_offpolicyness > 0,
                reference=self.ref.path != "",
                max_new_tokens=self.gconfig.max_new_tokens,
            )
        except ConfigError as error:
            raise ConfigError(f"actor.{error}") from None

    @property
    def algorithm(self) -> Algorithm:
        return self.resolved.algorithm

    def _check_algorithm(self, algorithm: Algorithm) -> None:
        try:
            algorithm.check()
        except ConfigError as error:
            raise ConfigError(f"actor.{error}") from None
        require(
            algorithm.kl_ctl == 0 or self.ref.path != "",
            f"actor.kl_ctl={algorithm.kl_ctl} needs a reference model; "
            f"set ref.path (usually {self.actor.path}) or actor.kl_ctl=0",
        )
        require(
            algorithm.adv_norm != "group" or self.gconfig.n_samples > 1,
            "actor.adv_norm=group needs gconfig.n_samples > 1, got 1; one sample has no spread",
        )
        require(
            not algorithm.dynamic_sampling or self.gconfig.n_samples > 1,
            "actor.dynamic_sampling drops groups of equal rewards, and with gconfig.n_samples=1 every group is one; "
            "set gconfig.n_samples > 1 or actor.dynamic_sampling=false",
        )
        self._check_teacher(algorithm)
        self._check_baseline(algorithm)
        self._check_stale(algorithm)

    def _check_sampling(self) -> None:
        """What is drawn can be learnt from, if the trainer knows what it was drawn from."""
        sampling, kind = self.gconfig, Backend.parse(self.rollout.backend).kind
        require(
            not sampling.is_greedy,
            f"gconfig must draw tokens to train on, got greedy={str(sampling.greedy).lower()}, temperature="
            f"{sampling.temperature:g}: where the likeliest is taken there is nothing to learn; use a temperature > 0",
        )
        unlimited = sampling.top_p == 1 and sampling.top_k == 0
        require(
            kind == "embedded" or unlimited or (kind == "vllm" and 0 < sampling.top_k <= VLLM_CHOICES),
            f"rollout.backend={kind} does not report what top_p and top_k leave to draw from"
            f"{f', unless top_k is 1 to {VLLM_CHOICES}' if kind == 'vllm' else ''}, so its answers cannot be "
            f"trained, got gconfig.top_p={sampling.top_p:g}, gconfig.top_k={sampling.top_k}; use "
            f"{'such a top_k, or top_p 1 and top_k 0' if kind == 'vllm' else '1 and 0'}, or rollout.backend=embedded",
        )

    def _check_stale(self, algorithm: Algorithm) -> None:
        """Only the decoupled loss, chosen or implied, weighs samples of any age rightly."""
        actor, rollout = self.actor, self.rollout
        same_arithmetic = rollout.dtype == actor.dtype == "float32"
        recomputes = actor.recompute_logprob is True or (actor.recompute_logprob == "auto" and not same_arithmetic)
        require(
            rollout.when_stale != "train" or algorithm.use_decoupled_loss or recomputes,
            "rollout.when_stale=train trains samples of any age, which needs the decoupled loss, got "
            "actor.use_decoupled_loss=false; set it to true, or rollout.when_stale to wait or drop",
        )

    def _check_teacher(self, algorithm: Algorithm) -> None:
        """One that teaches alone leaves nothing to those who judge rewards."""
        if not self.teacher.alone:
            return
        alone = f"teacher.path={self.teacher.path} teaches alone, so nothing would come of"
        remedy = "set teacher.with_rewards=true, or leave"
        require(not self.critic.path, f"{alone} critic.path={self.critic.path}; {remedy} critic.path out")
        require(not algorithm.dynamic_sampling, f"{alone} actor.dynamic_sampling; {remedy} it out")

    def _check_adapter(self) -> None:
        rank, kind = self.actor.lora.rank, Backend.parse(self.rollout.backend).kind
        if rank is None:
            return
        require(
            kind != "sglang",
            f"actor.lora.rank={rank} publishes adapters, which SGLang is not given, got rollout.backend="
            f"{self.rollout.backend}; use embedded or vllm, or leave actor.lora out",
        )
        require(
            kind != "vllm" or rank <= VLLM_RANKS[-1],
            f"vLLM takes adapters of a rank up to {VLLM_RANKS[-1]}, got actor.lora.rank={rank}; use a lower one, or "
            "rollout.backend=embedded",
        )

    def _check_baseline(self, algorithm: Algorithm) -> None:
        """A return is compared with a value or with its group, never with both."""
        baseline = algorithm.group_baseline
        if self.critic.path:
            require(
                baseline == "none",
                f"critic.path={self.critic.path} takes advantages against values, and actor.group_baseline="
                f"{baseline} against the group; set actor.group_baseline=none",
            )
            return
        require(
            algorithm.name.removesuffix(DECOUPLED) != "ppo",
            f"actor.algorithm={algorithm.name} takes advantages against a critic; set critic.path (usually "
            f"{self.actor.path}), or another algorithm",
        )
        require(
            baseline not in ("mean", "leave_one_out") or self.gconfig.n_samples > 1 or self.teacher.alone,
            f"actor.group_baseline={baseline} with gconfig.n_samples=1 makes every advantage 0; "
            "set gconfig.n_samples > 1 or actor.group_baseline=none",
        )
        for name in ("gae_lambda", "gae_over", "discount"):
            value = getattr(algorithm, name)
            require(
                value == DEFAULTS[name],
                f"actor.{name}={value} needs a critic; set critic.path (usually {self.actor.path}) or leave it out",
            )


@dataclass
class GRPOConfig(PPOConfig):
    """PPOConfig with GRPO's group sampling as the default."""

    gconfig: GenerationHyperparameters = field(default_factory=lambda: GenerationHyperparameters(n_samples=8))


@dataclass
class DPOConfig(ExperimentConfig):
    """Direct preference optimisation, on pairs of answers."""

    actor: ActorConfig = field(default_factory=lambda: ActorConfig(optimizer=OptimizerConfig(lr=1e-4)))
    beta: float = 0.1
    """How strongly the policy is held to the reference: the log-ratio to it, times this, is what a pair compares."""
    label_smoothing: float = 0.0
    """The share of pairs that are taken to be labelled the wrong way round."""
    nll_weight: float = 0.0
    """Weight of the chosen answer's negative log-likelihood per token, added to the loss: DPO alone may make both
    answers less likely, so long as the rejected one loses more."""
    ref: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The reference. It is asked about each pair once, and what it said is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.beta < math.inf, f"beta must be > 0, got {self.beta}")
        require(0 <= self.nll_weight < math.inf, f"nll_weight must be >= 0, got {self.nll_weight}")
        _check_label_smoothing(self.label_smoothing)


@dataclass
class RewardConfig(ExperimentConfig):
    """Training of a reward model, on pairs of answers."""

    actor: ActorConfig = field(default_factory=lambda: ActorConfig(optimizer=OptimizerConfig(lr=1e-3)))
    """The model that becomes one: its logits are replaced by a head that gives one score."""
    label_smoothing: float = 0.0
    """The share of pairs that are taken to be labelled the wrong way round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.actor.lora.rank is None,
            f"a reward model learns its head, of which an adapter has no part, got actor.lora.rank="
            f"{self.actor.lora.rank}; leave actor.lora out",
        )
        _check_label_smoothing(self.label_smoothing)


def _check_label_smoothing(value: float) -> None:
    require(0 <= value < 0.5, f"label_smoothing must lie in [0, 0.5), got {value}; at 0.5 pairs would say nothing")


@dataclass
class SFTConfig(ExperimentConfig):
    """Supervised fine-tuning on conversations."""

    actor: ActorConfig = field(default_factory=lambda: ActorConfig(optimizer=OptimizerConfig(lr=1e-3)))
