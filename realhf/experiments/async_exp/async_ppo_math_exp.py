"""The same names as `realhf.experiments.async_exp.async_math_ppo`."""

from realhf.experiments.async_exp.async_math_ppo import AsyncPPOMATHConfig, AsyncRLExperimentConfig, PPOMATHConfig

__all__ = ["AsyncPPOMATHConfig", "AsyncRLExperimentConfig", "PPOMATHConfig"]
