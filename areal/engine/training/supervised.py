"""Conversations as supervised examples: the assistant's turns are learned, everything else is given."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.api.errors import ModelError
from areal.engine.training.engine import TokenBatch
from areal.engine.training.figures import Figures
from areal.engine.training.packing import Span

Example = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
"""Messages and tools; an assistant's message with `"learn": False` is given, not learned."""

TOOL_GROUPS = 4
"""Examples with tools begin alike and share prefixes, in several groups because attention is quadratic in each."""


def supervised_batch(examples: Sequence[Example], tokenizer: Any) -> TokenBatch:
    """Every learned token weighs the same."""
    spans = [
        supervised_span(messages, tools, tokenizer, group=-(number % TOOL_GROUPS) - 1 if tools else number)
        for number, (messages, tools) in enumerate(examples)
    ]
    total = sum(len(span.asked) for span in spans)
    return TokenBatch(spans, torch.ones(total), {"weights": torch.full((total,), 1.0 / max(1, total))})


@dataclass(frozen=True)
class MeanNll:
    """A `Loss`: the mean negative log-likelihood."""

    def __call__(self, logprobs: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Figures]:
        return -(logprobs * fields["weights"]).sum(), Figures()


mean_nll = MeanNll()


def supervised_span(messages: list[dict[str, Any]], tools: Any, tokenizer: Any, group: int) -> Span:
    """One conversation, of which the learned turns are asked."""
    ids: list[int] = []
    asked: list[int] = []
    for piece, learned in _pieces(messages, tools, tokenizer):
        new = tokenizer.encode(piece, add_special_tokens=False)
        asked += range(len(ids), len(ids) + len(new)) if learned else ()
        ids += new
    return Span(np.array(ids, dtype=np.int64), np.array(asked, dtype=np.int64), group)


def _pieces(messages: list[dict[str, Any]], tools: Any, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """The rendered conversation cut at the learned turns, and whether each piece is learned."""

    def render(count: int, generation_prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        )

    answered = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("learn", True):
            continue
        prompt = render(number, True)
        yield _appended(answered, prompt), False
        answered = render(number + 1, False).rstrip("\n")
        yield _appended(prompt, answered), True


def _appended(before: str, after: str) -> str:
    if not after.startswith(before):
        raise ModelError(
            "the chat template changes earlier turns when a turn is added, so one sequence cannot teach them all; "
            'mark all but the last assistant message with "learn": false, or use another template'
        )
    return after[len(before) :]
