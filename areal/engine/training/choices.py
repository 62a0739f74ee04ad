"""Reads from which tokens those of an answer were drawn (`Choices`), for the log-probs that the trainer computes.

What top_p and top_k left was recorded with the answer. What a grammar and min_new_tokens left is worked out again here,
by the code that the engine drew with.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from areal.api.errors import ArealError, GrammarError
from areal.api.io_struct import Choices, cannot_train
from areal.api.messages import Array, Row
from areal.engine.inference.grammar import GrammarCompiler, banned_tokens, must_go_on
from areal.engine.training.token_sets import TokenSets

_NOTHING = np.empty(0, np.int32)


class ChoiceReader:
    """Reads the choices of rows, for one model."""

    def __init__(self, compiler: Callable[[], GrammarCompiler] | None = None) -> None:
        """`compiler` is called when the first grammar is met: a vocabulary takes a second to read. None = it knows no
        tokenizer, and so no grammar."""
        self._make_compiler = compiler

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        if self._make_compiler is None:
            raise ArealError("answers that follow a grammar are trained with the model's tokenizer, and there is none")
        return self._make_compiler()

    def read(self, rows: Sequence[Row]) -> tuple[TokenSets, Tensor] | None:
        """The sets, and which of them each trained token of the rows was drawn from; None = all from the whole
        vocabulary."""
        if not any(row.choices for row in rows):
            return None
        table, numbers = _Table(), []
        for row in rows:
            of_row = np.zeros(len(row.input_ids), np.int64)
            for choices in row.choices:
                tokens = row.input_ids[choices.begin : choices.end]
                of_row[choices.begin : choices.end] = [table.number(*each) for each in self._sets(choices, tokens)]
            numbers.append(of_row[row.loss_mask])
        return table.sets(), torch.from_numpy(np.concatenate(numbers))

    def _sets(self, choices: Choices, tokens: Array) -> "Iterable[tuple[Array, bool]]":
        """For each token of an answer the ids of its set, or if that is True, of what is not in it."""
        if choices.unreported:
            raise ArealError(f"an answer was drawn with top_p or top_k: {cannot_train(choices)}")
        if choices.greedy:
            return ((token, False) for token in tokens[:, None])
        if choices.sizes is not None:
            _check_recorded(choices, tokens)
            return ((left, False) for left in choices.sets())
        if choices.grammar is not None:
            return self._allowed_by_grammar(choices, tokens)
        stops, least = np.array(choices.stops, np.int32), choices.min_new_tokens
        if np.isin(tokens[:least], stops).any():
            raise _misfit(f"one of its first {least} tokens ends it, and min_new_tokens={least}")
        return ((stops if must_go_on(drawn, least, None) else _NOTHING, True) for drawn in range(len(tokens)))

    def _allowed_by_grammar(self, choices: Choices, tokens: Array) -> "Iterator[tuple[Array, bool]]":
        grammar = choices.grammar
        assert grammar is not None
        try:
            state = self._compiler.begin_now(grammar)
            for drawn, token in enumerate(tokens.tolist()):
                banned = banned_tokens(0, choices.stops, drawn, choices.min_new_tokens, state)
                assert banned is not None, "a grammar always says"
                if banned[token]:
                    raise GrammarError(f"it does not allow {token}")
                most = bool(2 * np.count_nonzero(banned) < len(banned))
                yield np.flatnonzero(banned if most else ~banned), most
                if drawn + 1 < len(tokens):  # the last may be a stop token, which no grammar knows
                    state.advance(token)
        except GrammarError as error:
            raise ArealError(
                f"an answer must follow the grammar that it was drawn under, got one that does not ({error}); train "
                "with the tokenizer and the version of llguidance that the engine has"
            ) from error


def _check_recorded(choices: Choices, tokens: Array) -> None:
    """Every token must be in the set that is recorded for it."""
    sizes = np.empty(0, np.int32) if choices.sizes is None else choices.sizes
    ids = _NOTHING if choices.ids is None else choices.ids
    if len(sizes) != len(tokens) or (sizes < 1).any() or sizes.sum() != len(ids) or (ids < 0).any():
        raise _misfit(f"{len(tokens)} tokens have {len(sizes)} sets of {sizes.sum()} tokens, and there are {len(ids)}")
    owners = np.repeat(np.arange(len(tokens)), sizes)
    found = np.bincount(owners, ids == tokens[owners], minlength=len(tokens))
    if not found.all():
        place = int(np.argmin(found))
        raise _misfit(f"token {tokens[place]}, the {place + 1}. of the answer, is not among those that were left")


def _misfit(what: str) -> ArealError:
    """Of a token that could not be drawn: its log-prob would be minus infinity."""
    return ArealError(
        f"the tokens of an answer must be of those that it was drawn from, got others: {what}; its row or its "
        "choices were changed since the engine answered"
    )


class _Table:
    """Collects sets."""

    def __init__(self) -> None:
        self._ids: list[Array] = []
        self._inverted: list[bool] = []
        self._numbers: dict[tuple[bytes, bool], int] = {}
        self.number(_NOTHING, inverted=True)  # the whole vocabulary

    def number(self, ids: Array, inverted: bool) -> int:
        """That of a set, which is added if it is new."""
        ids = ids.astype(np.int32, copy=False)
        number = self._numbers.setdefault((ids.tobytes(), inverted), len(self._ids))
        if number == len(self._ids):
            self._ids.append(ids)
            self._inverted.append(inverted)
        return number

    def sets(self) -> TokenSets:
        sizes = np.array([len(each) for each in self._ids])
        return TokenSets(
            torch.from_numpy(np.concatenate(self._ids).astype(np.int64)),
            torch.from_numpy(sizes.cumsum() - sizes),
            torch.from_numpy(sizes),
            torch.tensor(self._inverted),
        )
