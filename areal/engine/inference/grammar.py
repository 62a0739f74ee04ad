"""Which tokens may come next in an answer that must follow a grammar. Needs no torch.

llguidance compiles each grammar once for one tokenizer, in a thread; every answer then advances its own copy. A grammar
decides which tokens may come next and whether the answer may end; which tokens end it is up to the request.
"""

import asyncio
import threading
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from areal.api.errors import GrammarError, RequestError
from areal.api.io_struct import Grammar
from areal.api.messages import Array
from areal.utils.background import Background
from areal.utils.bounded_cache import BoundedCache

MAX_GRAMMARS = 64
"""Compiled grammars kept; the least recently used is dropped beyond this."""
MAX_GRAMMAR_CHARACTERS = 1 << 20
COMPILE_SECONDS = 20.0
"""A request whose grammar is not ready by then is refused."""
COMPILED_AT_ONCE = 4
MAX_LEXER_STATES = 50_000
"""Of one grammar, shared by its answers; about 2 kB each."""


class GrammarState:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: list[int], origin: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self.origin = origin

    @property
    def may_end(self) -> bool:
        """The answer so far is well-formed."""
        return bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        """The answer so far is well-formed, and nothing can follow."""
        return self.may_end and bool(self._matcher.is_stopped())

    def allowed(self, stops: Collection[int]) -> Array:
        """Which tokens may come next, bool [V], `stops` included where the answer may end. Raises GrammarError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        allowed[: len(known)] = known
        allowed[self._ends] = False  # these end an answer for the tokenizer, `stops` for the request
        if self.may_end:
            allowed[list(stops)] = True
        if not allowed.any():
            raise GrammarError(f"{self.origin} cannot be honoured: no token of this model continues the answer")
        return allowed

    def advance(self, token: int) -> None:
        """Take the token that was drawn. Raises GrammarError if it was not allowed."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"{self.origin} cannot be honoured: {_reason(self._matcher.get_error())}")


class GrammarCompiler:
    """Grammars for one tokenizer, each compiled on first use. Threads may share it: a lock guards what it holds."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`vocab_size` is the model's; tokens that the tokenizer does not have are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._compiled: BoundedCache[Grammar, Future[LLMatcher]] = BoundedCache(MAX_GRAMMARS)
        self._lock = threading.Lock()
        self._background = Background(COMPILED_AT_ONCE, "areal grammar")

    async def begin(self, grammar: Grammar) -> GrammarState:
        """The state before an answer's first token. Raises GrammarError that says what is wrong with the grammar."""
        known = self._find(grammar)
        if known is not None and known.done():
            return self._state(known.result(), grammar)
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                if known is None:
                    return await self._background.run(self.begin_now, grammar)
                return self._state(await asyncio.shield(asyncio.wrap_future(known)), grammar)
        except TimeoutError:
            raise GrammarError(
                f"{grammar.origin} cannot be honoured: a grammar must be ready within {COMPILE_SECONDS:g} s; "
                "make the schema simpler"
            ) from None

    def _find(self, grammar: Grammar) -> "Future[LLMatcher] | None":
        """The grammar compiled, or being compiled. None = not known, or the lock may be held for a second."""
        if self._vocabulary is None:
            return None
        with self._lock:
            return self._compiled.get(grammar)

    def begin_now(self, grammar: Grammar) -> GrammarState:
        """The same in the calling thread."""
        with self._lock:
            vocabulary = self._read_vocabulary()
            compiled = self._compiled.get(grammar)
            is_new = compiled is None
            if compiled is None:
                compiled = Future()
                self._compiled.put(grammar, compiled)
        if is_new:
            self._compile_into(compiled, grammar, vocabulary)
        return self._state(compiled.result(), grammar)

    def _state(self, compiled: LLMatcher, grammar: Grammar) -> GrammarState:
        assert self._vocabulary is not None, "nothing is compiled without it"
        ends = [token for token in self._vocabulary.eos_tokens if token < self._vocab_size]
        return GrammarState(compiled.deep_copy(), self._vocab_size, ends, grammar.origin)

    def _compile_into(self, compiled: "Future[LLMatcher]", grammar: Grammar, vocabulary: LLTokenizer) -> None:
        """Outside the lock, so that a big grammar delays only the requests that ask for it."""
        try:
            compiled.set_result(_compile(grammar, vocabulary))
        except BaseException as error:
            compiled.set_exception(error)
            with self._lock:
                self._compiled.drop(grammar)

    def _read_vocabulary(self) -> LLTokenizer:
        """Read on first use: a big vocabulary takes a second."""
        if self._vocabulary is None:
            core = getattr(self._tokenizer, "backend_tokenizer", None)
            if core is None:
                raise RequestError(
                    "grammars need an engine with a fast (Rust) tokenizer; ask for an answer without a grammar"
                )
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


# Forced text would be spelled as the tokenizer encodes it, which for a schema that quotes a special token is that very
# token; without forcing, text is text and every spelling of it is the model's own choice.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_SILENT = 0


def as_lark(grammar: Grammar) -> str:
    """The text that llguidance compiles."""
    return _OPTIONS + (f"start: %json {grammar.text}" if grammar.kind == "json_schema" else grammar.text)


def _compile(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(
            f"{grammar.origin} cannot be honoured: a grammar may have {MAX_GRAMMAR_CHARACTERS} characters, got "
            f"{len(grammar.text)}; make the schema smaller"
        )
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
    matcher = LLMatcher(vocabulary, as_lark(grammar), log_level=_SILENT, limits=limits)
    matcher.compute_bitmask()  # here rather than in a decode step: the first mask takes longest
    if matcher.is_error():
        raise GrammarError(f"{grammar.origin} cannot be honoured: {_reason(matcher.get_error())}")
    return matcher


_MAX_REASON = 200
"""Characters of llguidance's message that are passed on: it may quote a whole pattern."""


def _reason(error: str) -> str:
    """llguidance's message without the grammar and the parser's state, which it quotes."""
    text = error.rpartition("failed to compile JSON schema: ")[2]
    text = text.partition("\n   1 | ")[0].partition("\n<state>")[0]
    return " ".join(text.split())[:_MAX_REASON]
