"""One request on its way through an engine: what was asked, what has been drawn, and when it ends. Needs no torch."""

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from areal.api.errors import ContextLengthError, RequestError
from areal.api.io_struct import ModelRequest, ModelResponse, StopReason
from areal.config.generation import GenerationHyperparameters

SLACK_TOKENS = 8
"""Tokens looked at beyond a stop text's bytes, because the first of them may begin in the middle of a character."""


@dataclass(eq=False)
class Sequence:
    gconfig: GenerationHyperparameters
    ids: list[int]
    """Prompt, then what was drawn."""
    prompt_length: int
    stops: frozenset[int]
    """Stop tokens that the model can draw."""
    seed: int
    tokenizer: Any
    """Reads stop texts; None when there are none."""
    done: asyncio.Future[ModelResponse] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, req: ModelRequest, *, vocab_size: int, max_positions: int, tokenizer: Any) -> "Sequence":
        """A request that the model can serve; an impossible one is refused here, before it can hurt others."""
        g = req.gconfig
        if len(req.input_ids) + g.max_new_tokens > max_positions:
            raise ContextLengthError(
                f"a prompt of {len(req.input_ids)} tokens and max_new_tokens={g.max_new_tokens} "
                f"exceed the model's {max_positions} positions; shorten the prompt or lower max_new_tokens"
            )
        if not all(0 <= token < vocab_size for token in req.input_ids):
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
        )

    @property
    def drawn(self) -> int:
        return len(self.logprobs)

    @property
    def temperature(self) -> float:
        return 0.0 if self.gconfig.greedy else self.gconfig.temperature

    @property
    def must_go_on(self) -> bool:
        """The next token may not end it."""
        return self.drawn < self.gconfig.min_new_tokens

    def append(self, token: int, logprob: float, version: int) -> StopReason | None:
        """Take a drawn token; the answer is why it was the last one, None if it was not."""
        may_end = not self.must_go_on
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if may_end and (token in self.stops or self._completes_stop_text()):
            return "stop"
        return "length" if self.drawn >= self.gconfig.max_new_tokens else None

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
