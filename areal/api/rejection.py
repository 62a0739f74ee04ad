"""Why an episode yields no sample."""

from enum import StrEnum


class RejectReason(StrEnum):
    AGENT_ERROR = "agent_error"
    """The agent or workflow raised."""
    TIMEOUT = "timeout"
    """The episode outlived its deadline."""
    REWARD_ERROR = "reward_error"
    """The reward raised, crashed, or is not a finite number on a known completion."""
    REWARD_TIMEOUT = "reward_timeout"
    """The reward was killed at its deadline."""
    FILTERED = "filtered"
    """The workflow returned None, or a filter said no."""
    NO_INTERACTIONS = "no_interactions"
    """The agent never called the model."""
    STALE = "stale"
    """The sample was too many versions old when its turn came."""
