"""Reward functions: from a completion to a number. Each loads on first use, with the libraries that it needs.

A config names one by its import string: `reward_fn: areal.reward.gsm8k_reward`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.reward.code import code_reward
    from areal.reward.countdown import countdown_reward
    from areal.reward.exact_match import exact_match_reward
    from areal.reward.format import format_reward
    from areal.reward.gsm8k import gsm8k_reward
    from areal.reward.math_answer import extract_answer, math_answer_reward
    from areal.reward.math_verify import math_verify_reward
    from areal.reward.reasoning_gym import reasoning_gym_reward
    from areal.reward.sandbox import SandboxLimits, run_program

__all__ = [
    "SandboxLimits",
    "code_reward",
    "countdown_reward",
    "exact_match_reward",
    "extract_answer",
    "format_reward",
    "gsm8k_reward",
    "math_answer_reward",
    "math_verify_reward",
    "reasoning_gym_reward",
    "run_program",
]

_MODULES = {
    "SandboxLimits": "sandbox",
    "code_reward": "code",
    "countdown_reward": "countdown",
    "exact_match_reward": "exact_match",
    "extract_answer": "math_answer",
    "format_reward": "format",
    "gsm8k_reward": "gsm8k",
    "math_answer_reward": "math_answer",
    "math_verify_reward": "math_verify",
    "reasoning_gym_reward": "reasoning_gym",
    "run_program": "sandbox",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
