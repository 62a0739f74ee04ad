"""Scores: pure functions from a completion to a number."""

from areal.reward.exact_match import exact_match_reward
from areal.reward.math_answer import extract_answer, math_answer_reward

__all__ = ["exact_match_reward", "extract_answer", "math_answer_reward"]
