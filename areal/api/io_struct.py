"""A request to the inference engine and its response, in tokens."""

import operator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from areal.config.backend import VLLM_CHOICES
from areal.config.rollout import GenerationHyperparameters

if TYPE_CHECKING:  # errors.py needs this file, and whatever starts fast needs that
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

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


@dataclass(frozen=True)
class Steering:
    """What a request adds to the logits before a token is drawn. Its log-probs are those of the changed distribution,
    which a trainer does not compute: only answers that are not trained may be steered."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time the answer has it already."""
    presence_penalty: float = 0.0
    """Subtracted once if the answer has it at all."""
    bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""


Alternatives = list[dict[int, float]]
"""For each drawn token, the likeliest tokens in its place and their log-probs, likeliest first."""


@dataclass(frozen=True)
class Choices:
    """From which tokens those of an answer were drawn, where that was not always the whole vocabulary.

    What top_p and top_k leave depends on the weights, so it is recorded, without what a grammar or min_new_tokens
    excludes. If only these limit the choice, that follows from the tokens before, and is worked out again from their
    settings. Plain values and arrays only, which is how the run store keeps it.
    """

    begin: int
    end: int
    """The answer's tokens are those from `begin` up to this, among those of whatever has these choices."""
    greedy: bool = False
    """The likeliest token was taken each time: there was nothing to draw."""
    grammar_kind: str = ""
    """Of the `Grammar` that the answer follows; empty = none."""
    grammar_text: str = ""
    stops: list[int] = field(default_factory=list)
    """Tokens that end the answer, where its grammar or min_new_tokens says when it may."""
    min_new_tokens: int = 0
    sizes: "Array | None" = None
    """int32: how many tokens top_p and top_k left for each of the answer's; None = neither was asked for."""
    ids: "Array | None" = None
    """int32: these tokens, ascending, one set after the other."""
    unreported: str = ""
    """The engine that does not say what its top_p and top_k left, though they were asked for; empty = they are known.
    Such an answer cannot be trained."""

    @property
    def grammar(self) -> Grammar | None:
        kind: Any = self.grammar_kind
        return Grammar(kind, self.grammar_text) if kind else None

    def sets(self) -> "list[Array]":
        """What top_p and top_k left for each token; empty = that is not recorded."""
        if self.sizes is None or self.ids is None:
            return []
        ends = [0, *self.sizes.cumsum().tolist()]
        return [self.ids[begin:end] for begin, end in pairwise(ends)]

    def at(self, place: int, count: int) -> "Choices":
        """Those of the first `count` tokens, which are at `place`."""
        here = replace(self, begin=place, end=place + count)
        if self.sizes is None or self.ids is None or count == len(self.sizes):
            return here
        return replace(here, sizes=self.sizes[:count], ids=self.ids[: self.sizes[:count].sum()])


def cannot_train(choices: Choices) -> str:
    """Why what an engine has not reported cannot be trained, and what can be done."""
    return (
        f"{choices.unreported} does not report what these leave to draw from, so its answers cannot be trained; use "
        f"top_p 1 and top_k 0, on vLLM with any top_p a top_k of 1 to {VLLM_CHOICES}, or rollout.backend=embedded"
    )


class TokenIds(list[int]):
    """Ids that are known to be Python's own integers: a request does not look at each of them again."""


@dataclass
class ModelRequest:
    rid: str
    input_ids: list[int]
    gconfig: GenerationHyperparameters
    tokenizer: Any = None
    grammar: Grammar | None = None
    """None = the answer may be anything."""
    images: list[bytes] = field(default_factory=list)
    """Encoded images (PNG, JPEG, …) in the order of their places in `input_ids`, which hold placeholder tokens."""
    session: str = ""
    """The conversation it belongs to, which stays with the engine that has its beginning cached; empty = none."""
    drawn: "TokenChunk | None" = None
    """How the answer begins, if that was drawn before, perhaps by another engine, which goes on from there. These
    tokens count as the answer's own: against max_new_tokens and min_new_tokens, and for stop texts and grammars."""
    top_logprobs: int = 0
    """How many alternatives are told at each token; 0 = none. An engine that cannot tell them refuses the request."""
    steering: Steering | None = None
    """None = the model's own logits count. An engine that cannot change them refuses the request."""

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
    """Log-probability of each output token in the distribution that it was drawn from: divided by the temperature, and
    over the tokens that grammar, min_new_tokens, top_p and top_k left. Of a greedy answer, which is not drawn, what it
    would be at temperature 1."""
    output_versions: list[int]
    """Weight version that produced each output token."""
    stop_reason: StopReason
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the weights of each version in output_versions."""
    output_alternatives: Alternatives = field(default_factory=list)
    """As long as the answer if `ModelRequest.top_logprobs` asked for them, else empty."""
    choices: Choices | None = None
    """From which tokens they were drawn; None = each from the whole vocabulary."""

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


def add_digests(known: dict[int, str], reported: dict[int, str]) -> None:
    """Add what was reported of versions' weights. Where engines differ, both are kept: what nobody has published."""
    for version, digest in reported.items():
        if known.setdefault(version, digest) == digest:
            continue
        told = [*known[version].split(_AND), *digest.split(_AND)]
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
    alternatives: Alternatives = field(default_factory=list)
    """As long as `tokens` if they were asked for, else empty."""
    sets: "list[Array]" = field(default_factory=list)
    """int32: the tokens that top_p and top_k left for each of `tokens`; empty where neither was asked for."""

    def extend(self, later: "TokenChunk") -> None:
        """Append what was drawn next."""
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.versions += later.versions
        self.alternatives += later.alternatives
        self.sets += later.sets
        add_digests(self.digests, later.digests)
