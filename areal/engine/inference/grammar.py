"""What an answer may still become, token by token: grammars compiled for one tokenizer. Needs no torch.

Grammars are compiled by llguidance, in a thread, once each; every answer then walks its own copy. A grammar says which
tokens may come next and whether the answer may end; which tokens end it is the request's business.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from areal.api.errors import GrammarError, RequestError
from areal.api.io_struct import Grammar
from areal.api.messages import Array

REMEMBERED_GRAMMARS = 64
"""Compiled grammars kept; the least recently used is forgotten beyond this."""
MAX_LEXER_STATES = 50_000
"""Of one grammar, shared by its answers; about 2 kB each."""
MAX_REASON = 400
"""Characters of llguidance's message that are handed on: it may quote a whole pattern."""
SILENT = 0

# Forced text would be spelled as the tokenizer encodes it, which for a schema that quotes a special token is that very
# token; without forcing, text is text and every spelling of it is the model's own choice.
OPTIONS = '%llguidance {"no_forcing": true}\n'


class GrammarState:
    """The place of one answer in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: list[int], origin: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self.origin = origin

    @property
    def may_end(self) -> bool:
        """The answer is well-formed as it stands."""
        return bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        """It is, and nothing can follow."""
        return self.may_end and bool(self._matcher.is_stopped())

    def allowed(self, stops: Collection[int]) -> Array:
        """Which tokens may come next, bool [V]: `stops` among them where the answer may end. Raises GrammarError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        allowed[: len(known)] = known
        allowed[self._ends] = False  # the tokenizer's idea of an end; `stops` are the request's
        if self.may_end:
            allowed[list(stops)] = True
        if not allowed.any():
            raise GrammarError(f"{self.origin} cannot be honoured: no token of this model continues the answer")
        return allowed

    def advance(self, token: int) -> None:
        """Take the token that was drawn. Raises GrammarError if it is none of those allowed."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"{self.origin} cannot be honoured: {_reason(self._matcher.get_error())}")


class GrammarCompiler:
    """Grammars for one tokenizer, compiled when they are first asked for. Threads may share it."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`vocab_size` is the model's: it may have more tokens than the tokenizer, none of which is ever allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    async def begin(self, grammar: Grammar) -> GrammarState:
        """The start of an answer. Raises GrammarError that says what is wrong with it."""
        return await asyncio.to_thread(self.begin_now, grammar)

    def begin_now(self, grammar: Grammar) -> GrammarState:
        with self._lock:
            vocabulary = self._read_vocabulary()
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._compile(grammar, vocabulary)
        matcher = compiled.result().deep_copy()
        ends = [token for token in vocabulary.eos_tokens if token < self._vocab_size]
        return GrammarState(matcher, self._vocab_size, ends, grammar.origin)

    def _compile(self, grammar: Grammar, vocabulary: LLTokenizer) -> "Future[LLMatcher]":
        """Outside the lock, so that a big grammar delays those who ask for it only."""
        compiled: Future[LLMatcher] = Future()
        with self._lock:
            if (begun := self._compiled.setdefault(grammar, compiled)) is not compiled:
                return begun
            if len(self._compiled) > REMEMBERED_GRAMMARS:
                self._compiled.popitem(last=False)
        try:
            compiled.set_result(_compile(grammar, vocabulary))
        except BaseException as error:
            compiled.set_exception(error)
            with self._lock:
                self._compiled.pop(grammar, None)
        return compiled

    def _read_vocabulary(self) -> LLTokenizer:
        """The tokenizer's words; a second's work for a big one, so it is done on first use."""
        if self._vocabulary is None:
            core = getattr(self._tokenizer, "backend_tokenizer", None)
            if core is None:
                raise RequestError("grammars need an engine with a fast (Rust) tokenizer; ask for free text")
            try:
                self._vocabulary = _vocabulary(core, self._tokenizer.eos_token_id, self._vocab_size)
            except ValueError as error:
                raise RequestError(f"grammars cannot be used with this model's tokenizer: {error}") from error
        return self._vocabulary


def _vocabulary(core: Any, end: int | None, vocab_size: int) -> LLTokenizer:
    own = type(core).from_str(core.to_str())  # a copy: what follows must not change how prompts are encoded
    own.no_padding()
    own.no_truncation()
    size = max(vocab_size, own.get_vocab_size(with_added_tokens=True))
    return LLTokenizer(own.to_str(), n_vocab=size, eos_token=end)


def _compile(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    text = f"start: %json {grammar.text}" if grammar.kind == "json_schema" else grammar.text
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
    matcher = LLMatcher(vocabulary, OPTIONS + text, log_level=SILENT, limits=limits)
    matcher.compute_bitmask()  # here rather than in a decode step: the first mask is the dearest
    if matcher.is_error():
        raise GrammarError(f"{grammar.origin} cannot be honoured: {_reason(matcher.get_error())}")
    return matcher


def _reason(error: str) -> str:
    """llguidance's message without its quotation of the grammar and the parser's state."""
    text = error.rpartition("failed to compile JSON schema: ")[2]
    text = text.partition("\n   1 | ")[0].partition("\n<state>")[0]
    return " ".join(text.split())[:MAX_REASON]
