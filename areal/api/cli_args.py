"""The config classes under the name that users import them by. Imports no torch."""

from areal.config.errors import ConfigError
from areal.config.experiment import (
    DatasetConfig,
    DPOConfig,
    ExperimentConfig,
    GRPOConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
)
from areal.config.loader import load_expr_config
from areal.config.rollout import AgentConfig, GenerationHyperparameters, ProxyConfig, ProxyLimits, RolloutConfig
from areal.config.training import (
    ActorConfig,
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

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "ConfigError",
    "DPOConfig",
    "DatasetConfig",
    "EvaluatorConfig",
    "ExperimentConfig",
    "GRPOConfig",
    "GenerationHyperparameters",
    "MetricsConfig",
    "OptimizerConfig",
    "PPOConfig",
    "ProxyConfig",
    "ProxyLimits",
    "RecoverConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "SFTConfig",
    "SaverConfig",
    "SchedulerConfig",
    "StoreConfig",
    "TeacherConfig",
    "TrackingConfig",
    "ViewerConfig",
    "load_expr_config",
]
