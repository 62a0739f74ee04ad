"""A request to the inference engine and its response, in tokens."""

import operator
from dataclasses import dataclass, field
from typing import Any, Literal

from areal.config.rollout import GenerationHyperparameters

_AND = " and "
StopReason = Literal["stop", "length", "abort"]
"""stop = a stop token or text; length = max_new_tokens; abort = the caller went away."""


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like. An engine that cannot enforce it refuses the request."""

    kind: Literal["json_schema", "lark"]
    """lark = llguidance's variant of Lark's syntax; the rule `start` is the whole answer."""
    text: str
    origin: str = "the grammar"
    """Where it came from; errors begin with this."""


class TokenIds(list[int]):
    """Ids that are known to be Python's own integers: a request does not look at each of them again."""


@dataclass
class ModelRequest:
    rid: str
    input_ids: list[int]
    gconfig: GenerationHyperparameters
    tokenizer: Any = None
    grammar: Grammar | None = None
    """None = the answer may be anything. Either way, log-probs are those of the unmasked distribution."""
    images: list[bytes] = field(default_factory=list)
    """Encoded images (PNG, JPEG, …) in the order of their places in `input_ids`, which hold placeholder tokens."""
    session: str = ""
    """The conversation it belongs to, which stays with the engine that has its beginning cached; empty = none."""
    drawn: "TokenChunk | None" = None
    """How the answer begins, if that was drawn before, perhaps by another engine, which goes on from there. These
    tokens count as the answer's own: against max_new_tokens and min_new_tokens, and for stop texts and grammars."""

    def __post_init__(self) -> None:
        if type(self.input_ids) is not TokenIds:
            self.input_ids = self._integers()
        if not self.input_ids:
            raise ValueError("input_ids must hold at least one token, got none")

    def _integers(self) -> list[int]:
        try:
            return [operator.index(token) for token in self.input_ids]
        except TypeError:
            first = next(iter(self.input_ids), None)
            raise TypeError(
                f"input_ids must be integers, got {type(first).__name__} {first!r}; if they come from "
                "apply_chat_template(tokenize=True), pass return_dict=False "
                "or load the tokenizer with areal.utils.hf_utils.load_hf_tokenizer"
            ) from None


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
    """Digest of the weights of each version in output_versions."""

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


def add_digests(known: dict[int, str], reported: dict[int, str]) -> None:
    """Add what was reported of versions' weights. Where engines differ, both are kept: what nobody has published."""
    for version, digest in reported.items():
        told = [*known.get(version, digest).split(_AND), *digest.split(_AND)]
        known[version] = _AND.join(dict.fromkeys(told))


@dataclass
class TokenChunk:
    """Part of an answer that is still being sampled: the tokens since the previous chunk."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    response: ModelResponse | None = None
    """The whole answer, `ModelRequest.drawn` included; in the last chunk only."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the weights of each version in `versions`."""

    def extend(self, later: "TokenChunk") -> None:
        """Append what was drawn next."""
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.versions += later.versions
        add_digests(self.digests, later.digests)
