"""One request on its way through an engine: what was asked, what has been drawn, and when it ends. Needs no torch."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal.api.errors import ContextLengthError, RequestError
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason, TokenChunk
from areal.api.messages import Array
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.grammar import GrammarState

SLACK_TOKENS = 8
"""Tokens looked at beyond a stop text's bytes, because the first of them may begin in the middle of a character."""


@dataclass(eq=False)
class SequenceState:
    gconfig: GenerationHyperparameters
    ids: list[int]
    """Prompt, then what was drawn."""
    prompt_length: int
    stops: frozenset[int]
    """Stop tokens that the model can draw."""
    seed: int
    tokenizer: Any
    """Reads stop texts; None when there are none."""
    images: tuple[bytes, ...] = ()
    """Encoded pictures in the order of their places in the prompt."""
    done: asyncio.Future[ModelResponse] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    grown: asyncio.Event | None = None
    """Set at every token; None unless somebody streams them."""
    grammar: GrammarState | None = None
    """Where the answer stands in the grammar it must follow; None = it may be anything."""

    @property
    def simple(self) -> bool:
        """Nothing is asked of it but to end at a stop token or at its length, and nobody watches it grow."""
        early = self.stops and self.gconfig.min_new_tokens > 0
        return self.grammar is None and self.grown is None and not self.gconfig.stop and not early

    @classmethod
    def of(cls, req: ModelRequest, *, vocab_size: int, max_positions: int, tokenizer: Any) -> "SequenceState":
        """A request that the model can serve; an impossible one is refused here, before it can hurt others."""
        g = req.gconfig
        if len(req.input_ids) + g.max_new_tokens > max_positions:
            raise ContextLengthError(
                f"a prompt of {len(req.input_ids)} tokens and max_new_tokens={g.max_new_tokens} "
                f"exceed the model's {max_positions} positions; shorten the prompt or lower max_new_tokens"
            )
        if min(req.input_ids) < 0 or max(req.input_ids) >= vocab_size:
            raise RequestError(f"input_ids must lie in [0, {vocab_size}); a token of another tokenizer?")
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
        return len(self.logprobs)

    @property
    def temperature(self) -> float:
        return 0.0 if self.gconfig.greedy else self.gconfig.temperature

    @property
    def must_go_on(self) -> bool:
        """The next token may not end it; a grammar that is complete leaves nothing else to draw."""
        early = self.drawn < self.gconfig.min_new_tokens
        return early and (self.grammar is None or not self.grammar.complete)

    def banned(self, vocab_size: int) -> Array | None:
        """The tokens that may not come next, bool [V]; None = there are none. Raises RequestError."""
        if self.grammar is not None:
            return ~self.grammar.allowed(() if self.must_go_on else self.stops)
        if not (self.stops and self.must_go_on):
            return None
        banned = np.zeros(vocab_size, dtype=np.bool_)
        banned[list(self.stops)] = True
        return banned

    def append(self, token: int, logprob: float, version: int) -> StopReason | None:
        """Take a drawn token; the answer is why it was the last one, None if it was not. Raises RequestError."""
        may_end = not self.must_go_on
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.settle(version)
        if self.grown is not None:
            self.grown.set()
        if may_end and (token in self.stops or self._completes_stop_text()):
            return "stop"
        if self.grammar is not None:
            self.grammar.advance(token)
            if self.grammar.complete and (not self.stops or self.drawn >= self.gconfig.max_new_tokens):
                return "stop"  # nothing was cut off
        return "length" if self.drawn >= self.gconfig.max_new_tokens else None

    def settle(self, version: int) -> None:
        """What was drawn since the last call is of this version."""
        self.versions += [version] * (len(self.logprobs) - len(self.versions))

    def response(self, reason: StopReason, digests: dict[int, str]) -> ModelResponse:
        """The answer; `digests` knows the weights of every version."""
        return ModelResponse(
            input_tokens=self.ids[: self.prompt_length],
            output_tokens=self.ids[self.prompt_length :],
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            stop_reason=reason,
            digests={version: digests[version] for version in set(self.versions)},
        )

    def chunk(self, start: int, response: ModelResponse | None = None) -> TokenChunk:
        """What was drawn from the `start`-th token on."""
        return TokenChunk(
            self.ids[self.prompt_length + start :], self.logprobs[start:], self.versions[start:], response
        )

    async def chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """The answer while it is drawn: a chunk per token, more at once for a slow reader. Raises what `done` does."""
        grown = self.grown = asyncio.Event()
        self.done.add_done_callback(lambda _: grown.set())
        sent, response = 0, None
        while response is None:
            await grown.wait()
            grown.clear()
            response = self.done.result() if self.done.done() else None
            chunk = self.chunk(sent, response)
            sent = self.drawn
            yield chunk

    def _completes_stop_text(self) -> bool:
        stops = self.gconfig.stop
        if not stops:
            return False
        window = max(len(stop.encode()) for stop in stops) + SLACK_TOKENS  # a token is at least a byte
        tail = self.ids[max(self.prompt_length, len(self.ids) - window) :]
        text, before = self._text(tail), self._text(tail[:-1])
        # Counted, because a text that min_new_tokens let pass must not end the completion later.
        return any(text.count(stop) > before.count(stop) for stop in stops)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))
