"""Answers as rows, and what their tokens were drawn from, for tests that compute their log-probs again."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tiny_models import TINY, byte_tokenizer

from areal.api.io_struct import ModelResponse
from areal.api.messages import Row
from areal.engine.inference.grammar import GrammarCompiler
from areal.engine.models import vocab_size
from areal.engine.training.choices import ChoiceReader
from areal.engine.training.engine import TokenBatch
from areal.engine.training.token_sets import FIELD
from areal.utils.hf_utils import load_hf_tokenizer

READER = ChoiceReader(lambda: GrammarCompiler(byte_tokenizer(), TINY.vocab_size, trusted=True))


def reader_of(model: Path) -> ChoiceReader:
    """For a model with a tokenizer of its own."""
    return ChoiceReader(lambda: GrammarCompiler(load_hf_tokenizer(model), vocab_size(model), trusted=True))


def with_sets(batch: TokenBatch, answers: Sequence[ModelResponse], reader: ChoiceReader = READER) -> TokenBatch:
    """A batch of all tokens of these answers, with what they were drawn from."""
    if found := reader.read([row_of(answer) for answer in answers]):
        batch.sets, batch.fields[FIELD] = found
    return batch


def row_of(response: ModelResponse) -> Row:
    """Greedy answers have log-probs over all that was allowed, though one token of it was sure to be taken."""
    count, sampled = response.input_len + response.output_len, slice(response.input_len, None)
    row = Row(
        input_ids=np.array(response.input_tokens + response.output_tokens, np.int32),
        loss_mask=np.zeros(count, np.bool_),
        **{name: np.zeros(count, np.float32) for name in ("logprobs", "returns", "temperatures")},
        **{name: np.full(count, -1, np.int32) for name in ("versions", "completion_index")},
        reward=0.0,
    )
    row.loss_mask[sampled] = True
    row.logprobs[sampled], row.versions[sampled] = response.output_logprobs, response.output_versions
    if response.choices is not None and not response.choices.greedy:
        row.choices.append(response.choices.at(response.input_len, response.output_len))
    return row
