"""How an agent asks for generations, and what it gets."""

from collections.abc import Hashable
from dataclasses import dataclass

import areal.config.generation
from areal.config.errors import require


@dataclass
class GenerationHyperparameters(areal.config.generation.GenerationHyperparameters):
    """The settings of `areal`, and how many outputs one observation is answered with.

    `n_samples` is another thing: how many episodes of a task are run, each with its own call of `collect_trajectory`.
    """

    n: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.n >= 1, f"n must be >= 1, got {self.n}")


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
    """Of each token of a sequence but its first, so one fewer; 0 on the prompt."""
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
