"""The experiment of the older guide: a math agent trained by PPO while its episodes go on.

Copy or subclass `AsyncPPOMATHConfig`, and pass your class to `realhf.training.main_async_ppo.main`. These configs have
every setting of `areal`'s GRPOConfig too.
"""

from dataclasses import dataclass, field

from areal.config.errors import ConfigError, require
from areal.config.experiment import DatasetConfig, GRPOConfig
from areal.config.rollout import AgentConfig, GenerationHyperparameters, RolloutConfig
from areal.config.training import ActorConfig, EvaluatorConfig, OptimizerConfig
from realhf.api.core.agent_api import AgentAbstraction, EnvServiceAbstraction

HELD_OUT_TASKS = 512


@dataclass
class QuestionsConfig:
    path: str = ""
    """`builtin:NAME` or a .jsonl file; the older name of train_dataset.path."""


@dataclass
class AsyncRLExperimentConfig:
    """Which agent acts in which environment, and how episodes run."""

    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            max_concurrent_rollouts=128, num_workers=2, agent=AgentConfig(timeout_seconds=60, turn_discount=0.9)
        )
    )

    @property
    def agent(self) -> AgentAbstraction:
        raise ConfigError(f"{type(self).__name__} must have a property `agent` that returns an AgentAbstraction")

    @property
    def env(self) -> EnvServiceAbstraction:
        raise ConfigError(f"{type(self).__name__} must have a property `env` that returns an EnvServiceAbstraction")


@dataclass
class PPOMATHConfig(GRPOConfig):
    """Questions with one right answer, and the model that learns them; the defaults need no download."""

    experiment_name: str = "async-ppo-math"
    total_train_steps: int | None = 120
    dataset: QuestionsConfig = field(default_factory=QuestionsConfig)
    actor: ActorConfig = field(
        default_factory=lambda: ActorConfig(
            eps_clip_higher=0.28, ppo_n_minibatches=2, optimizer=OptimizerConfig(lr=3e-4, lr_scheduler="cosine")
        )
    )
    gconfig: GenerationHyperparameters = field(
        default_factory=lambda: GenerationHyperparameters(n_samples=8, max_new_tokens=48)
    )
    train_dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(batch_size=16))
    valid_dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(size=HELD_OUT_TASKS))
    """Held-out questions: of a built-in task, its own; for a file there are none unless a path is given here."""
    evaluator: EvaluatorConfig = field(default_factory=lambda: EvaluatorConfig(freq_steps=20))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._merge_paths()
        for name in ("workflow", "reward_fn"):
            value = getattr(self, name)
            require(value == "", f"{name}={value} is not for this experiment, whose agent and env decide; leave it out")
        agent = self.rollout.agent
        require(
            agent.mode == "inline",
            f"rollout.agent.mode={agent.mode} is not for agents with queues, which run inline; leave it out",
        )
        require(
            agent.export_style == "individual",
            f"rollout.agent.export_style={agent.export_style} is not for agents that return their own sequences; "
            "leave it out",
        )

    def _merge_paths(self) -> None:
        """`dataset.path` and `train_dataset.path` are one setting."""
        old, new = self.dataset.path, self.train_dataset.path
        require(old == new or "" in (old, new), f"dataset.path={old} and train_dataset.path={new} differ; keep one")
        path = old or new or "builtin:sort-digits"
        self.dataset.path = self.train_dataset.path = path
        if not self.valid_dataset.path and path.startswith("builtin:"):
            self.valid_dataset.path = path


@dataclass
class AsyncPPOMATHConfig(AsyncRLExperimentConfig, PPOMATHConfig):
    my_param: float = 1.0
    """What a right answer is worth to the trainer; reported rewards stay 1 and 0."""
    num_turns: int = 2
    """The most tries that an episode has."""

    @property
    def agent(self) -> AgentAbstraction:
        return AgentAbstraction(
            "math-multi-turn",
            args={
                "my_param": self.my_param,
                "num_turns": self.num_turns,
                "turn_level_discount": self.rollout.agent.turn_discount,
            },
        )

    @property
    def env(self) -> EnvServiceAbstraction:
        return EnvServiceAbstraction(
            "math-code-single-step",
            args={"dataset_path": self.dataset.path, "valid_path": self.valid_dataset.path},
        )
