"""Every error a user can meet, one type per boundary that a failure crosses, and why an episode is rejected.

ArealError
├── ConfigError                 a setting is wrong                                  (config/errors.py)
├── WorkflowError               a workflow cannot be found, made or called
├── ModelError                  a model directory is missing or of another family
├── KernelUnavailable           the native kernel cannot be had on this machine, or not for this model
├── DatasetError                tasks cannot be read
├── TraceError                  a trace to be simulated cannot be read
├── RunExists                   a run of that name exists and must not be overwritten
├── EngineError                 the inference engine failed
│   ├── EngineGone              the engine has ended; another may go on with what it had drawn
│   ├── RequestError            one request is impossible; the engine is fine
│   │   ├── ContextLengthError  prompt and answer do not fit the model's positions
│   │   ├── DrawnRefused        an engine cannot go on from tokens that were drawn before
│   │   └── GrammarError        an answer cannot be held to its grammar
│   └── WeightMismatch          tokens came from weights that were never published
│       └── WrongWeights        an engine took published weights, and computes with others
├── PlacementRefused            a scheduler has no place for what was asked; says what is free
├── ProcessDied                 a process of the run ended; says which and how
│   └── RanksLost               it was a rank of the model that is trained: all of them end, and are started again
├── GroupLost                   a process that a group of episodes needed ended; the group runs again
├── NothingAccepted             every episode is rejected; says why
├── NonFiniteUpdate             the loss or gradient of an update is not a finite number
└── EpisodeRejected             one episode yields no sample; carries its reason
    ├── AgentFailed             the agent's own code raised
    ├── EpisodeTimeout          it took longer than allowed
    ├── RewardError             there is no reward that could be trained on
    │   ├── RewardInvalid       it is not a finite number, or names no completion
    │   ├── RewardTimeout       the reward function was killed at its deadline
    │   ├── RewardRaised        the reward function raised
    │   ├── RewardLoadFailed    the reward function or its arguments cannot be loaded in a worker process
    │   └── RewardCrashed       the reward function ended its process
    │       └── RewardOutOfMemory  it needed more memory than its process may use
    └── NoInteractions          the agent never called the model
"""

from enum import StrEnum

from areal.api.io_struct import TokenChunk
from areal.config.errors import ArealError, ConfigError

__all__ = [
    "AgentFailed",
    "ArealError",
    "ConfigError",
    "ContextLengthError",
    "DatasetError",
    "DrawnRefused",
    "EngineError",
    "EngineGone",
    "EpisodeRejected",
    "EpisodeTimeout",
    "GrammarError",
    "GroupLost",
    "KernelUnavailable",
    "ModelError",
    "NoInteractions",
    "NonFiniteUpdate",
    "NothingAccepted",
    "PlacementRefused",
    "ProcessDied",
    "RanksLost",
    "RejectReason",
    "RequestError",
    "RewardCrashed",
    "RewardError",
    "RewardInvalid",
    "RewardLoadFailed",
    "RewardOutOfMemory",
    "RewardRaised",
    "RewardTimeout",
    "RunExists",
    "TraceError",
    "WeightMismatch",
    "WorkflowError",
    "WrongWeights",
]


class WorkflowError(ArealError):
    """A workflow cannot be imported, constructed or called."""


class ModelError(ArealError):
    """A model directory is missing, broken, or of a family this package does not run."""


class KernelUnavailable(ArealError):
    """The native kernel cannot be built, loaded or used; says why and what to do."""


class DatasetError(ArealError):
    """Tasks cannot be read."""


class TraceError(ArealError):
    """A trace to be simulated cannot be read."""


class RunExists(ArealError):
    """A run of that name exists and must not be overwritten."""


class EngineError(ArealError):
    """The inference engine failed."""


class EngineGone(EngineError):
    """The engine has ended; another may go on with what it had drawn."""

    def __init__(self, text: str, drawn: TokenChunk | None = None) -> None:
        super().__init__(text)
        self.drawn = drawn or TokenChunk()
        """What is known of the answer beyond `ModelRequest.drawn`; a stream has given it to its reader instead."""


class RequestError(EngineError):
    """One request is impossible as asked; the engine is fine."""


class ContextLengthError(RequestError):
    """Prompt and answer together do not fit the model's positions."""


class DrawnRefused(RequestError):
    """An engine cannot go on from the tokens in `ModelRequest.drawn`; without them it may answer the request."""


class GrammarError(RequestError):
    """An answer cannot be held to its grammar; the message begins with where that came from."""


class WeightMismatch(EngineError):
    """Tokens came from weights that the trainer never published."""


class WrongWeights(WeightMismatch):
    """An engine took published weights without an error, and computes with others: no token of it can be trusted."""


class PlacementRefused(ArealError):
    """A scheduler has no place for what was asked, or not in time; says what was asked for and what is free."""


class ProcessDied(ArealError):
    """A process of the run ended when it should not have."""


class RanksLost(ProcessDied):
    """A rank that trains the model has ended, and the others with it."""


class GroupLost(ArealError):
    """A process that a group of episodes needed has ended; the group runs again."""


class NothingAccepted(ArealError):
    """Every episode is rejected, so training would never get a batch."""


class RejectReason(StrEnum):
    """Why an episode yields no sample."""

    AGENT_ERROR = "agent_error"
    """The agent or workflow raised."""
    TIMEOUT = "timeout"
    """The episode outlived its deadline."""
    REWARD_ERROR = "reward_error"
    """The reward function raised, crashed or cannot be loaded, or the reward is not a finite number on a known
    completion; the error's type says which."""
    REWARD_TIMEOUT = "reward_timeout"
    """The reward was killed at its deadline."""
    FILTERED = "filtered"
    """The workflow returned None, or a filter said no."""
    NO_INTERACTIONS = "no_interactions"
    """The agent never called the model."""
    STALE = "stale"
    """The sample was too many versions old when its turn came."""


class NonFiniteUpdate(ArealError):
    """The loss or the gradient of an update is not a finite number; the weights were not changed."""


class EpisodeRejected(ArealError):
    """One episode yields no sample."""

    reason = RejectReason.FILTERED


class AgentFailed(EpisodeRejected):
    """The agent's own code raised."""

    reason = RejectReason.AGENT_ERROR


class EpisodeTimeout(EpisodeRejected):
    """The episode took longer than `rollout.agent.timeout_seconds`."""

    reason = RejectReason.TIMEOUT


class RewardError(EpisodeRejected):
    """There is no reward that could be trained on."""

    reason = RejectReason.REWARD_ERROR


class RewardInvalid(RewardError):
    """The reward is not a finite number, or names a completion that does not exist."""


class RewardTimeout(RewardError):
    """The reward function was killed at its deadline."""

    reason = RejectReason.REWARD_TIMEOUT


class RewardRaised(RewardError):
    """The reward function raised."""


class RewardLoadFailed(RewardError):
    """The reward function's module or its arguments cannot be sent to a worker process, or loaded there."""


class RewardCrashed(RewardError):
    """The reward function ended the process that it ran in."""


class RewardOutOfMemory(RewardCrashed):
    """The reward function needed more memory than its process may use."""


class NoInteractions(EpisodeRejected):
    """The agent never called the model."""

    reason = RejectReason.NO_INTERACTIONS
