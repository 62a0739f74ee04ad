"""What travels between the driver, the rollout workers and the engine. Plain dataclasses; arrays are numpy."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from areal.api.errors import RejectReason
from areal.api.io_struct import Choices
from areal.config.rollout import GenerationHyperparameters, ProxyConfig, RolloutConfig

ENGINE_ROLE = "engine"
RANK_ROLE = "rank"
WORKER_ROLE = "rollout worker"
"""What a process calls itself when it connects to the driver."""

Array = np.ndarray[Any, np.dtype[Any]]
FEW_TOKENS = 64
"""Of so many and fewer, Python finds the least and the most sooner than numpy."""


@dataclass(frozen=True)
class EngineAddress:
    """An engine that serves, as the driver tells the rollout workers."""

    name: str
    start: int
    """Which process of that name it is: the first, or one that replaced it."""
    address: str
    """`unix:PATH` or `tcp:HOST:PORT`."""
    secret: bytes | None = None
    """What opens it to those who may generate; None = it follows from the run's secret, which its processes know."""


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a rollout worker needs to know. Travels pickled, because workflows are the user's objects."""

    rollout: RolloutConfig
    gconfig: GenerationHyperparameters
    workflow: bytes
    """A packed `WorkflowSpec`."""
    eval_workflow: bytes
    """The same; empty, or equal to `workflow` = the very object that trains also evaluates."""
    engines: list[EngineAddress]
    """Those that serve now."""
    tokenizer_path: str
    max_positions: int
    reward_fn: str
    """An import string; empty = none."""
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    seed: int | None = None
    """The run's, which decides what is sampled; None = nothing does."""
    vocab_size: int | None = None
    """The model's: token ids lie below it. None = it is not known, so what workflows return is not compared with it."""


@dataclass
class GroupTask:
    """A task to be run `n_samples` times."""

    task_id: int
    data: bytes
    """The task's dict, pickled."""
    n_samples: int
    is_eval: bool = False
    greedy: bool = False


@dataclass
class Row:
    """One training row: a prompt and the completions that follow it. All arrays are 1-D and of one length."""

    input_ids: Array
    """int32"""
    loss_mask: Array
    """bool: True on sampled tokens that are to be trained."""
    logprobs: Array
    """float32: the sampler's, of the distribution that each token was drawn from (`choices`), 0 on prompt."""
    versions: Array
    """int32: weight version of each sampled token, -1 on prompt."""
    returns: Array
    """float32: the return of each token, 0 on prompt. An export gives all tokens of a completion the same."""
    completion_index: Array
    """int32: which completion of the episode a token belongs to, -1 on prompt."""
    temperatures: Array
    """float32: what the logits were divided by, 1 on prompt."""
    reward: float
    """Raw reward of the row's last completion."""
    recompute_logprobs: bool = False
    """True where the workflow reported no log-probs, so the trainer computes them."""
    truncated: bool = False
    """The last completion ended for length."""
    images: list[bytes] = field(default_factory=list)
    """Encoded images in the order of their places in `input_ids`."""
    group_id: int | None = None
    """Which of its task's groups it is compared within; None = the one of all rows that name none."""
    truncated_completions: list[int] = field(default_factory=list)
    """Indices of trained completions before the last that ended for length."""
    choices: list[Choices] = field(default_factory=list)
    """Of trained completions whose tokens were not drawn from the whole vocabulary."""

    def truncated_tokens(self) -> Array:
        """bool: True on trained tokens of completions that ended for length."""
        ended = list(self.truncated_completions)
        if self.truncated and self.loss_mask.any():
            ended.append(int(self.completion_index[self.loss_mask][-1]))
        if not ended:  # nearly every row: to look for none of them takes ten times as long
            return np.zeros(len(self.loss_mask), bool)
        truncated: Array = self.loss_mask & np.isin(self.completion_index, ended)
        return truncated


@dataclass(frozen=True)
class TrainedRow:
    """What an update computed for the trained tokens of a row: float32, as long as `loss_mask.sum()`."""

    advantages: Array
    """What the loss was given; NaN on truncated completions that are masked."""
    logprobs: Array
    """The trainer's, at the row's temperatures. Those of the weights before the step where these were computed
    beforehand (the proximal ones), else those of the pass that trained the token: the same in the first minibatch, and
    in later ones of the weights that the minibatches before it have changed. NaN where nothing was computed: sequences
    whose advantages are all 0, what is not trained, and updates that were skipped."""
    entropies: Array = field(default_factory=lambda: np.empty(0, np.float32))
    """In nats, of what the trainer would have drawn each token from when it trained it; NaN where nothing was computed.
    Empty = of a time at which they were not kept."""


@dataclass
class Node:
    """One answer of the model in the tree of an episode.

    Its tokens are those of the episode's rows whose `completion_index` is its place among the nodes.
    """

    parent: int | None
    """The node whose conversation it continues, which comes before it; None = it began one."""
    extends: bool
    """Its tokens go on from the parent's; False where the template rendered the conversation so far differently."""
    messages: list[dict[str, Any]]
    """The conversation after the parent's answer, up to this one, as a person reads it: images are described."""
    message: dict[str, Any]
    """The answer."""
    reward: float | None
    """What the agent gave; None = nothing."""
    finish: str
    """Why it ended: stop, length or tool_calls."""
    tools: list[str]
    """Names of what the model was offered to call."""
    asked: float
    """When, in seconds of the episode."""
    answered: float
    """The same."""


@dataclass
class Episode:
    """The outcome of one accepted episode."""

    rows: list[Row]
    reward: float
    """Sum of the raw rewards given in it."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as a person reads it."""
    stats: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    seconds: float = 0.0
    turns: list[tuple[float, float, int]] = field(default_factory=list)
    """For each call of the model: when it was asked and when it had answered, in seconds of the episode, and the number
    of tokens it sampled."""
    nodes: list[Node] = field(default_factory=list)
    """Every answer, a parent before its children; empty where no tree was recorded: the workflow returned tensors."""

    @property
    def oldest_version(self) -> int | None:
        """The weight version of the oldest trained token; None if no token is trained."""
        return self._trained[1]

    @property
    def newest_version(self) -> int | None:
        """The same of the newest."""
        return self._trained[2]

    @property
    def truncated(self) -> bool:
        """Whether a completion in it ended for length."""
        return any(row.truncated or row.truncated_completions for row in self.rows)

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that are trained."""
        return self._trained[0]

    @cached_property
    def _trained(self) -> tuple[int, int | None, int | None]:
        """How many tokens are trained, and the oldest and newest of their versions.

        They are asked for again and again, by when all of an episode is known.
        """
        sampled = [row.versions[row.loss_mask] for row in self.rows] or [np.empty(0, np.int32)]
        versions = sampled[0] if len(sampled) == 1 else np.concatenate(sampled)
        if len(versions) > FEW_TOKENS:
            return len(versions), int(versions.min()), int(versions.max())
        few = versions.tolist()
        return (len(few), min(few), max(few)) if few else (0, None, None)


@dataclass
class Rejection:
    """Why one episode was not accepted."""

    reason: RejectReason
    detail: str
    """One line."""
    trace: str = ""
    """The user's traceback, if their code raised."""


@dataclass(frozen=True)
class Stall:
    """One callback that held a rollout worker's event loop, so that every other episode there waited."""

    where: str
    """`file:line` of the user's code."""
    function: str
    source: str
    """The line's text; empty if it cannot be read."""
    remedy: str
    workflow: str
    """Whose episode it was; empty outside of one."""
    task_id: int | None
    seconds: float
    process: int
    """The id of the process it happened in, which has already logged it."""


@dataclass
class Doing:
    """What a part of a run does or waits for when somebody asks. Times are relative, since clocks of hosts differ."""

    part: str
    """`rollout worker 0`"""
    what: str
    """The rest of a sentence that begins with the part: `waits for the model`."""
    seconds: float | None = None
    """For how long; None = that is not known, or does not matter."""
    left_seconds: float | None = None
    """How much longer at most; None = no deadline ends it."""
    limit: str = ""
    """The setting that says so, with its value; empty = none does."""
    count: int = 1
    """Parts that do the same; this is the one that has done it for longest."""
    inside: list["Doing"] = field(default_factory=list)
    """What the parts of this part do."""


@dataclass
class GroupResult:
    """All samples of one task."""

    task_id: int
    episodes: list[Episode]
    rejections: list[Rejection]
    digests: dict[int, str]
    """Digest the engine reported for each weight version that these episodes were sampled with."""
    stalls: list[Stall] = field(default_factory=list)
    """What blocked the worker's event loop since its last result, whichever episode did."""

    @property
    def oldest_version(self) -> int:
        """The weight version of the oldest trained token; only a group with an episode has one."""
        known = (episode.oldest_version for episode in self.episodes)
        return min(version for version in known if version is not None)
