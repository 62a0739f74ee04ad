"""A user's own functions for stages, and some that do not fit."""

from typing import Any

NOT_A_FUNCTION = 3


def halved(logprobs: Any, log_ratio: Any, advantages: Any, algorithm: Any) -> Any:
    """An objective: half of REINFORCE."""
    return -advantages * logprobs / 2


def first_half(returns: Any, groups: Any, completions: Any, episodes: Any) -> Any:
    """Advantages: the returns themselves, halved."""
    return returns / 2


def twice(log_ratio: Any, completions: Any) -> Any:
    """A ratio: the square of a token's."""
    return 2 * log_ratio


def even(log_weights: Any, advantages: Any, completions: Any) -> Any:
    """A correction: every token weighs 1."""
    return log_weights * 0 + 1


def squared(log_difference: Any, log_ratio: Any) -> Any:
    """A KL estimate."""
    return log_difference**2


def by_ten(completions: Any, episodes: Any, algorithm: Any) -> Any:
    """Weights: a tenth for each token."""
    return completions * 0 + 0.1


def too_few(logprobs: Any) -> Any:
    return logprobs
