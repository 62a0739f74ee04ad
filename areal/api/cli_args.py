"""The config classes under the name that users import them by. Imports no torch."""

from areal.config.actor import ActorConfig, OptimizerConfig, ReferenceConfig
from areal.config.dataset import DatasetConfig
from areal.config.errors import ConfigError
from areal.config.experiment import ExperimentConfig, GRPOConfig, PPOConfig, SFTConfig
from areal.config.generation import GenerationHyperparameters
from areal.config.loader import load_expr_config
from areal.config.proxy import ProxyConfig, ProxyLimits
from areal.config.rollout import AgentConfig, RolloutConfig
from areal.config.upkeep import EvaluatorConfig, RecoverConfig, SaverConfig, SchedulerConfig

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "ConfigError",
    "DatasetConfig",
    "EvaluatorConfig",
    "ExperimentConfig",
    "GRPOConfig",
    "GenerationHyperparameters",
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
    "load_expr_config",
]
