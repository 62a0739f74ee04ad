"""One request on its way through an engine: its prompt, the tokens drawn so far, and when it ends. Needs no torch."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal.api.errors import (
    ContextLengthError,
    DrawnRefused,
    EngineError,
    GrammarError,
    RequestError,
    WeightMismatch,
)
from areal.api.io_struct import Alternatives, Choices, ModelRequest, ModelResponse, Steering, StopReason, TokenChunk
from areal.api.messages import Array
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.grammar import GrammarState, banned_tokens, must_go_on

PROCESS_ENDS = (KeyboardInterrupt, SystemExit)
"""No request is at fault for these; for all else one may be, panics of Rust code included, which are no `Exception`."""
_SLACK_TOKENS = 8
"""Tokens looked at beyond a stop text's bytes, because the first of them may begin in the middle of a character."""

MAX_SET_TOKENS = 1 << 22
"""What top_p and top_k leave for the tokens of one answer, in all: it is kept, sent and stored, four bytes for each."""


@dataclass(eq=False)
class SequenceState:
    gconfig: GenerationHyperparameters
    ids: list[int]
    """The prompt, then the tokens drawn."""
    prompt_length: int
    stops: frozenset[int]
    """Stop tokens that the model can draw."""
    seed: int
    tokenizer: Any
    """Reads stop texts; None when there are none."""
    limited: bool
    """top_p or top_k limits what is drawn."""
    images: tuple[bytes, ...] = ()
    """Encoded images, in the order of their placeholders in the prompt."""
    done: asyncio.Future[ModelResponse] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sets: list[Array] = field(default_factory=list)
    """What top_p and top_k left for each drawn token, if the sequence is limited; an empty one is not known."""
    set_tokens: int = 0
    """How many tokens these are in all."""
    engine: str = "the engine"
    """What people call the engine that draws it."""
    reported: bool = True
    """Whether that says what they left."""
    top_logprobs: int = 0
    """How many alternatives are told at each token."""
    alternatives: Alternatives = field(default_factory=list)
    """One for each token drawn, if they are."""
    steering: Steering | None = None
    """What is added to the logits; None = nothing."""
    resumed: TokenChunk = field(default_factory=TokenChunk)
    """How the answer began, before it came to this engine."""
    grown: asyncio.Event | None = None
    """Set at every token; None unless the request is streamed."""
    grammar: GrammarState | None = None
    """The state of the grammar that the answer must follow; None = it may be anything."""
    grammar_stops: frozenset[int] | None = None
    """Of `stops`, those that the engine draws where the grammar lets the answer end; None = all."""
    failures: int = 0
    """Steps that failed, perhaps because of it."""

    @classmethod
    def of(cls, req: ModelRequest, *, vocab_size: int, max_positions: int, tokenizer: Any) -> "SequenceState":
        """The start of a request; one that the model cannot serve is refused here, before it can hurt others."""
        g = req.gconfig
        if len(req.input_ids) + g.max_new_tokens > max_positions:
            raise ContextLengthError(
                f"a prompt of {len(req.input_ids)} tokens and max_new_tokens={g.max_new_tokens} "
                f"exceed the model's {max_positions} positions; shorten the prompt or lower max_new_tokens"
            )
        tokens = req.input_ids if req.drawn is None else [*req.input_ids, *req.drawn.tokens]
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise RequestError(
                f"input_ids must lie in [0, {vocab_size}), got {wrong}; encode prompts with the model's own tokenizer"
            )
        if req.steering is not None:
            beyond = next((token for token in req.steering.bias if not 0 <= token < vocab_size), None)
            if beyond is not None:
                raise RequestError(f"logit_bias must be of tokens in [0, {vocab_size}), got {beyond}")
        if g.stop and tokenizer is None:
            raise RequestError("stop texts need an engine with a tokenizer; use stop_token_ids")
        return cls(
            gconfig=g,
            ids=list(req.input_ids),
            prompt_length=len(req.input_ids),
            stops=frozenset(token for token in g.stop_token_ids if 0 <= token < vocab_size),
            seed=secrets.randbits(63) if g.seed is None else g.seed % 2**64,
            tokenizer=tokenizer,
            limited=not g.is_greedy and (g.top_p < 1 or 0 < g.top_k < vocab_size),
            images=tuple(req.images),
            top_logprobs=min(req.top_logprobs, vocab_size),
            steering=req.steering,
        )

    @property
    def drawn(self) -> int:
        """How many tokens."""
        return len(self.logprobs)

    @property
    def simple(self) -> bool:
        """It ends at a stop token or at its length, asks for nothing else and is not streamed."""
        plain = self.grammar is None and self.steering is None and not self.top_logprobs
        plain = plain and self.grown is None and not self.gconfig.stop
        return plain and not self.limited and not self._ends_late

    @property
    def _ends_late(self) -> bool:
        """min_new_tokens keeps it from ending."""
        return bool(self.stops) and self.gconfig.min_new_tokens > 0

    @property
    def temperature(self) -> float:
        """0 = greedy."""
        return 0.0 if self.gconfig.is_greedy else self.gconfig.temperature

    @property
    def must_go_on(self) -> bool:
        """The next token may not end the answer, unless a complete grammar leaves nothing else to draw."""
        return must_go_on(self.drawn, self.gconfig.min_new_tokens, self.grammar)

    def banned(self, vocab_size: int) -> Array | None:
        """The tokens that may not come next, bool [V]; None if there are none. Raises RequestError."""
        return banned_tokens(vocab_size, self.stops, self.drawn, self.gconfig.min_new_tokens, self.grammar)

    def append(self, token: int, logprob: float, version: int, left: Array | None = None) -> StopReason | None:
        """Append a drawn token; return why it is the last one, None if it is not. Raises RequestError.

        `left`: what top_p and top_k left to draw it from.
        """
        may_end = not self.must_go_on
        self.ids.append(token)
        self.logprobs.append(logprob)
        if left is not None:
            self._add_set(left)
        self.record_version(version)
        if self.grown is not None:
            self.grown.set()
        if may_end and (token in self.stops or self._completes_stop_text()):
            return "stop"
        if self.grammar is not None:
            self.grammar.advance(token)
            if self.grammar.complete and (not self.stops or self.drawn >= self.gconfig.max_new_tokens):
                return "stop"  # nothing was cut off
        return "length" if self.drawn >= self.gconfig.max_new_tokens else None

    def _add_set(self, left: Array) -> None:
        self.sets.append(left)
        self.set_tokens += len(left)
        if self.set_tokens > MAX_SET_TOKENS:
            g = self.gconfig
            raise RequestError(
                f"top_p and top_k may leave at most {MAX_SET_TOKENS} tokens for those of an answer in all, got "
                f"{self.set_tokens} after {self.drawn} tokens with top_p={g.top_p:g} and top_k={g.top_k}; lower top_k, "
                "top_p or the temperature, or use top_p 1 and top_k 0"
            )

    def resume(self, drawn: TokenChunk, digests: dict[int, str]) -> StopReason | None:
        """Begin with tokens that were drawn before; return why the last of them is the answer's last, if it is.

        `digests` are those of this engine's versions. Raises RequestError for tokens that cannot begin the answer, and
        DrawnRefused, which leaves the request without its drawn tokens possible, where its grammar does not take them.
        """
        self._check_drawn(drawn, digests)
        reason: StopReason | None = None
        sets: Sequence[Array | None] = drawn.sets or [None] * len(drawn.tokens)
        for token, logprob, version, left in zip(drawn.tokens, drawn.logprobs, drawn.versions, sets, strict=True):
            if reason is not None:
                raise RequestError(
                    f"drawn must end where the answer does ({reason}), got {len(drawn.tokens) - self.drawn} more tokens"
                )
            try:
                reason = self.append(token, logprob, version, left)
            except GrammarError as error:
                raise DrawnRefused(f"token {self.drawn - 1} of drawn breaks the grammar: {error}") from None
        self.resumed = drawn
        self.alternatives = list(drawn.alternatives)
        return reason

    def _check_drawn(self, drawn: TokenChunk, digests: dict[int, str]) -> None:
        lengths = [len(drawn.tokens), len(drawn.logprobs), len(drawn.versions)]
        if len(set(lengths)) > 1:
            raise RequestError(f"drawn must have a log-prob and a version for every token, got {lengths}")
        if self.top_logprobs and len(drawn.alternatives) != lengths[0]:
            raise RequestError(
                f"drawn must have the alternatives of {lengths[0]} tokens, got {len(drawn.alternatives)}; top_logprobs "
                "asks for them"
            )
        known = len(drawn.tokens) if self.limited and self.reported else 0
        if len(drawn.sets) != known:
            raise RequestError(
                f"drawn must have what top_p and top_k left for each of {known} tokens, got {len(drawn.sets)}"
            )
        if missing := set(drawn.versions) - set(drawn.digests):
            raise RequestError(f"drawn must have the digest of every version, got none of {sorted(missing)}")
        for version, digest in drawn.digests.items():
            if digests.get(version, digest) != digest:
                raise WeightMismatch(
                    f"the tokens in drawn say that version {version} has the weights {digest}, this engine has "
                    f"{digests[version]}; the engines of a run must get the same weights"
                )

    def record_version(self, version: int) -> None:
        """The tokens drawn since the last call are of this version."""
        self.versions += [version] * (len(self.logprobs) - len(self.versions))

    def response(self, reason: StopReason, digests: dict[int, str]) -> ModelResponse:
        """The answer; `digests` has the digest of every version's weights."""
        return ModelResponse(
            input_tokens=self.ids[: self.prompt_length],
            output_tokens=self.ids[self.prompt_length :],
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            stop_reason=reason,
            digests=self._digests(self.versions, digests),
            output_alternatives=self.alternatives,
            choices=self.choices(),
        )

    def choices(self) -> Choices | None:
        """From which tokens those of the answer were drawn; None = each from the whole vocabulary."""
        g = self.gconfig
        if self.grammar is None and not (self._ends_late or self.limited or g.is_greedy):
            return None
        if g.is_greedy:
            return Choices(0, self.drawn, greedy=True)
        if self.limited and not (self.reported and all(map(len, self.sets))):
            return Choices(0, self.drawn, unreported=self.engine)
        if self.limited:  # what a grammar excludes is not in these sets either
            sizes = np.array([len(left) for left in self.sets], np.int32)
            return Choices(0, self.drawn, sizes=sizes, ids=np.concatenate([np.empty(0, np.int32), *self.sets]))
        grammar = None if self.grammar is None else self.grammar.grammar
        stops = self.stops if self.grammar_stops is None else self.grammar_stops
        return Choices(
            0,
            self.drawn,
            grammar_kind="" if grammar is None else grammar.kind,
            grammar_text="" if grammar is None else grammar.text,
            stops=sorted(stops),
            min_new_tokens=g.min_new_tokens,
        )

    def answer(self, response: ModelResponse) -> None:
        """Give the caller its answer, unless it has gone: that may be so at any moment, a step's own included."""
        if not self.done.done():
            self.done.set_result(response)

    def fail(self, error: BaseException) -> None:
        """Tell the caller what happened, unless it has gone."""
        if not self.done.done():
            known = isinstance(error, EngineError)
            self.done.set_exception(error if known else EngineError(f"the engine failed at this request: {error!r}"))

    def chunk(self, start: int, digests: dict[int, str], response: ModelResponse | None = None) -> TokenChunk:
        """The tokens drawn from number `start` on."""
        versions = self.versions[start:]
        return TokenChunk(
            tokens=self.ids[self.prompt_length + start :],
            logprobs=self.logprobs[start:],
            versions=versions,
            response=response,
            digests=self._digests(versions, digests),
            alternatives=self.alternatives[start:],
            sets=self.sets[start:],
        )

    async def until_grown(self, every_seconds: float) -> None:
        """Wait for the next token, or for `every_seconds`, in which there may be many; or for the end.

        Only what is read token by token is drawn in the slower way that tells of each.
        """
        if every_seconds > 0:
            await asyncio.wait((self.done,), timeout=every_seconds)
            return
        if self.grown is None:
            grown = self.grown = asyncio.Event()
            self.done.add_done_callback(lambda _: grown.set())
        await self.grown.wait()
        self.grown.clear()

    def _digests(self, versions: list[int], digests: dict[int, str]) -> dict[int, str]:
        """Of these versions: this engine's, or those that came with the tokens that were drawn before."""
        return {each: digests.get(each) or self.resumed.digests[each] for each in set(versions)}

    def _completes_stop_text(self) -> bool:
        stops = self.gconfig.stop
        if not stops:
            return False
        window = max(len(stop.encode()) for stop in stops) + _SLACK_TOKENS  # a token is at least a byte
        tail = self.ids[max(self.prompt_length, len(self.ids) - window) :]
        text, before = self._text(tail), self._text(tail[:-1])
        # Counted, because a text that min_new_tokens let pass must not end the completion later.
        return any(text.count(stop) > before.count(stop) for stop in stops)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))
