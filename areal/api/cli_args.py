"""The config classes under the name that users import them by. Imports no torch."""

from areal.config.errors import ConfigError
from areal.config.experiment import DatasetConfig, ExperimentConfig, GRPOConfig, PPOConfig, SFTConfig
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
    ViewerConfig,
)

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "ConfigError",
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
    "RolloutConfig",
    "SFTConfig",
    "SaverConfig",
    "SchedulerConfig",
    "StoreConfig",
    "ViewerConfig",
    "load_expr_config",
]
