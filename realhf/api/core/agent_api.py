"""What an agent and an environment of the older interface are, and every name that they are written with.

Agents and environments are registered under names, by which configs refer to them. Loads no torch.
"""

import asyncio
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from areal.api.errors import WorkflowError
from areal.config import rollout
from areal.config.errors import require
from areal.utils.callables import name_of

__all__ = [
    "Agent",
    "AgentAbstraction",
    "BundledGenerationOutputs",
    "EnvServiceAbstraction",
    "EnvironmentService",
    "GenerationHyperparameters",
    "SequenceSample",
    "register_agent",
    "register_environment",
]


class Agent(ABC):
    """One object serves every episode of a process, concurrently: keep nothing of an episode on `self`."""

    @abstractmethod
    async def collect_trajectory(
        self,
        prompt: "SequenceSample",
        env: "EnvironmentService",
        obs_queue: "asyncio.Queue[Any]",
        act_queue: "asyncio.Queue[BundledGenerationOutputs]",
    ) -> "list[SequenceSample] | None":
        """Put `(qid, token_ids, gconfig)`, get the answers, return what is to be trained on.

        An empty list rejects the episode. None keeps everything that was generated: the reward of the last `env.step`
        goes to the last answers, and from there to earlier turns by `rollout.agent.turn_discount`.
        """


class EnvironmentService(ABC):
    """One object serves every episode of a process, concurrently: keep an episode's state under its qid."""

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # noqa: B027
        """Start over; an environment without state has nothing to do."""

    @abstractmethod
    async def step(self, action: Any) -> Any:
        """Judge `(qid, answers)`. The result reaches the agent as it is: `(obs, reward, terminated, truncated, info)`,
        or any tuple whose second entry is the reward, one number per answer or one for all."""


@dataclass
class SequenceSample:
    """A prompt for an agent, or the trajectories that it returns. `docs/legacy.md` lists the keys of both."""

    ids: list[Hashable]
    """A prompt's is its question's id, the qid."""
    data: dict[str, Any]
    """Tensors, arrays or lists, 1-D, packed end to end under named keys."""
    seqlens: dict[str, list[list[int]]] = field(default_factory=dict)
    """By key, for each id: the lengths of its sequences. Only those of `packed_input_ids` are read, the others follow;
    without them there is one sequence."""
    keys: Collection[str] = ()
    """Those of `data`; may be left out."""
    metadata: dict[str, list[Any]] = field(default_factory=dict)
    """For each id. A prompt's has its `task`, the dict from the dataset."""
    dtypes: dict[str, Any] = field(default_factory=dict)
    """Not used: the values have their own."""
    trailing_shapes: dict[str, Any] = field(default_factory=dict)
    """Not used: the values have their own."""

    def __post_init__(self) -> None:
        if self.keys and set(self.keys) != set(self.data):
            differing = ", ".join(sorted(set(self.keys) ^ set(self.data)))
            raise WorkflowError(f"keys of a SequenceSample must be those of its data, they differ in {differing}")
        self.keys = set(self.data)

    @property
    def bs(self) -> int:
        return len(self.ids)


@dataclass
class LegacyGenerationHyperparameters(rollout.GenerationHyperparameters):
    """The settings of `areal`, and how many answers one observation gets.

    `n_samples` is something else: how many episodes of a task are run, each with its own call of `collect_trajectory`.
    """

    n: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.n >= 1, f"n must be >= 1, got {self.n}")


GenerationHyperparameters = LegacyGenerationHyperparameters
"""The name that older code imports it by."""


@dataclass
class BundledGenerationOutputs:
    """The answers to one observation. All lists but `prompt_ids` have one entry per answer."""

    qid: Hashable
    """That of the observation."""
    prompt_ids: list[int]
    output_ids: list[list[int]]
    """Sampled tokens, the end token included."""
    seqs: list[list[int]]
    """Prompt and sampled tokens."""
    logprobs: list[list[float]]
    """Of each token of a sequence except the first, so one fewer; 0 on the prompt."""
    no_eos: list[bool]
    """True where an answer was cut off for length."""
    version_start: list[int]
    """Weight version that sampled an answer's first token."""
    version_end: list[int]
    """Weight version that sampled its last."""

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def seqlens(self) -> list[int]:
        return [len(seq) for seq in self.seqs]


@dataclass(frozen=True)
class Abstraction:
    """Which class an experiment uses."""

    type_: str
    """The name it is registered under."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its constructor's arguments; `gconfig` and `tokenizer` come from the config unless they are given here."""


class AgentAbstraction(Abstraction):
    """An agent by name."""


class EnvServiceAbstraction(Abstraction):
    """An environment by name."""


class Registry:
    """Classes by name. A name belongs to one class; redefining that class, as a notebook does, replaces it."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._classes: dict[str, type[Any]] = {}

    def register(self, name: str, cls: type[Any]) -> None:
        if not inspect.isclass(cls):
            raise WorkflowError(f"an {self._noun} is registered by its class, got {cls!r} as {name!r}")
        known = self._classes.get(name)
        if known is not None and name_of(known) != name_of(cls):
            raise WorkflowError(
                f"the {self._noun} name {name!r} belongs to {name_of(known)} and cannot be given to {name_of(cls)}; "
                "register it under another name"
            )
        self._classes[name] = cls

    def find(self, name: str) -> type[Any]:
        if name not in self._classes:
            raise WorkflowError(
                f"no {self._noun} is registered as {name!r}, there are {', '.join(sorted(self._classes)) or 'none'}; "
                f"call register_{self._noun}({name!r}, YourClass) before the training starts"
            )
        return self._classes[name]


AGENTS = Registry("agent")
ENVIRONMENTS = Registry("environment")


def register_agent(name: str, agent_cls: type[Agent]) -> None:
    """Let configs refer to an agent by `name`."""
    AGENTS.register(name, agent_cls)


def register_environment(name: str, env_cls: type[EnvironmentService]) -> None:
    """Let configs refer to an environment by `name`."""
    ENVIRONMENTS.register(name, env_cls)


def constructor_arguments(cls: type[Any], args: dict[str, Any], offered: dict[str, Any]) -> dict[str, Any]:
    """`args`, and those of `offered` that the constructor names; refuses what could not be constructed."""
    if inspect.isabstract(cls):
        raise WorkflowError(f"{name_of(cls)} must define {', '.join(sorted(cls.__abstractmethods__))}")
    signature = inspect.signature(cls)
    arguments = {name: value for name, value in offered.items() if name in signature.parameters} | args
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise WorkflowError(
            f"{name_of(cls)} cannot be constructed: {error}; its arguments are the `args` of its abstraction"
        ) from None
    return arguments


def question_id(task: dict[str, Any]) -> str:
    """A task's qid: its own, or one made of its content, so that every reader of a dataset finds the same one."""
    for key in ("query_id", "qid", "id"):
        if key in task:
            return str(task[key])
    text = json.dumps(task, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
