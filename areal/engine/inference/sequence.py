"""One request on its way through an engine: its prompt, the tokens drawn so far, and when it ends. Needs no torch."""

import asyncio
import secrets
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
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason, TokenChunk
from areal.api.messages import Array
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.grammar import GrammarState

PROCESS_ENDS = (KeyboardInterrupt, SystemExit)
"""No request is at fault for these; for all else one may be, panics of Rust code included, which are no `Exception`."""
_SLACK_TOKENS = 8
"""Tokens looked at beyond a stop text's bytes, because the first of them may begin in the middle of a character."""


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
    images: tuple[bytes, ...] = ()
    """Encoded images, in the order of their placeholders in the prompt."""
    done: asyncio.Future[ModelResponse] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    resumed: TokenChunk = field(default_factory=TokenChunk)
    """How the answer began, before it came to this engine."""
    grown: asyncio.Event | None = None
    """Set at every token; None unless the request is streamed."""
    grammar: GrammarState | None = None
    """The state of the grammar that the answer must follow; None = it may be anything."""
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
        if g.stop and tokenizer is None:
            raise RequestError("stop texts need an engine with a tokenizer; use stop_token_ids")
        return cls(
            gconfig=g,
            ids=list(req.input_ids),
            prompt_length=len(req.input_ids),
            stops=frozenset(token for token in g.stop_token_ids if 0 <= token < vocab_size),
            seed=secrets.randbits(63) if g.seed is None else g.seed % 2**64,
            tokenizer=tokenizer,
            images=tuple(req.images),
        )

    @property
    def drawn(self) -> int:
        """How many tokens."""
        return len(self.logprobs)

    @property
    def simple(self) -> bool:
        """It ends at a stop token or at its length, asks for nothing else and is not streamed."""
        early = self.stops and self.gconfig.min_new_tokens > 0
        return self.grammar is None and self.grown is None and not self.gconfig.stop and not early

    @property
    def temperature(self) -> float:
        """0 = greedy."""
        return 0.0 if self.gconfig.is_greedy else self.gconfig.temperature

    @property
    def must_go_on(self) -> bool:
        """The next token may not end the answer, unless a complete grammar leaves nothing else to draw."""
        early = self.drawn < self.gconfig.min_new_tokens
        return early and (self.grammar is None or not self.grammar.complete)

    def banned(self, vocab_size: int) -> Array | None:
        """The tokens that may not come next, bool [V]; None if there are none. Raises RequestError."""
        if self.grammar is not None:
            return ~self.grammar.allowed(() if self.must_go_on else self.stops)
        if not (self.stops and self.must_go_on):
            return None
        banned = np.zeros(vocab_size, dtype=np.bool_)
        banned[list(self.stops)] = True
        return banned

    def append(self, token: int, logprob: float, version: int) -> StopReason | None:
        """Append a drawn token; return why it is the last one, None if it is not. Raises RequestError."""
        may_end = not self.must_go_on
        self.ids.append(token)
        self.logprobs.append(logprob)
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

    def resume(self, drawn: TokenChunk, digests: dict[int, str]) -> StopReason | None:
        """Begin with tokens that were drawn before; return why the last of them is the answer's last, if it is.

        `digests` are those of this engine's versions. Raises RequestError for tokens that cannot begin the answer, and
        DrawnRefused, which leaves the request without its drawn tokens possible, where its grammar does not take them.
        """
        self._check_drawn(drawn, digests)
        reason: StopReason | None = None
        for token, logprob, version in zip(drawn.tokens, drawn.logprobs, drawn.versions, strict=True):
            if reason is not None:
                raise RequestError(
                    f"drawn must end where the answer does ({reason}), got {len(drawn.tokens) - self.drawn} more tokens"
                )
            try:
                reason = self.append(token, logprob, version)
            except GrammarError as error:
                raise DrawnRefused(f"token {self.drawn - 1} of drawn breaks the grammar: {error}") from None
        self.resumed = drawn
        return reason

    def _check_drawn(self, drawn: TokenChunk, digests: dict[int, str]) -> None:
        lengths = [len(drawn.tokens), len(drawn.logprobs), len(drawn.versions)]
        if len(set(lengths)) > 1:
            raise RequestError(f"drawn must have a log-prob and a version for every token, got {lengths}")
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
