"""One question to the engine and its answer, in tokens."""

import operator
from dataclasses import dataclass, field
from typing import Any, Literal

from areal.config.generation import GenerationHyperparameters

StopReason = Literal["stop", "length", "abort"]
"""stop = a stop token or text; length = max_new_tokens; abort = the caller went away."""


@dataclass
class ModelRequest:
    rid: str
    input_ids: list[int]
    gconfig: GenerationHyperparameters
    tokenizer: Any = None

    def __post_init__(self) -> None:
        try:
            self.input_ids = [operator.index(token) for token in self.input_ids]
        except TypeError:
            first = next(iter(self.input_ids), None)
            raise TypeError(
                f"input_ids must be integers, got {type(first).__name__} {first!r}; if they come from "
                "apply_chat_template(tokenize=True), pass return_dict=False "
                "or load the tokenizer with areal.utils.hf_utils.load_hf_tokenizer"
            ) from None
        if not self.input_ids:
            raise ValueError("input_ids must hold at least one token, got none")


@dataclass
class ModelResponse:
    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    """Log-probability of each output token under the temperature-scaled policy that sampled it."""
    output_versions: list[int]
    """Weight version that produced each output token."""
    stop_reason: StopReason
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the weights behind each version in output_versions."""

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)
