"""A grammar compiled and walked a few steps, in a process that may die of it.

llguidance is native code that follows a grammar recursively: one that is nested too deeply ends its process with a
segmentation fault, and no setting of it prevents that. So `grammar.GrammarCompiler` compiles a grammar only after a
process of its own has survived it. Both compile by this module; it imports nothing heavy, for that process starts while
a request waits.
"""

import random
import threading
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_LEXER_STATES = 50_000
"""Of one grammar, shared by its answers; about 2 kB each."""
WALKS = 2
STEPS = 12
"""Tokens of one walk. A walk draws any token that is allowed, and ends where none is."""
_SILENT = 0


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, as text that can be sent."""

    tokenizer: str
    """A fast tokenizer's JSON."""
    size: int
    end: int | None

    def read(self) -> LLTokenizer:
        """Takes a second for a big one. Raises ValueError for a tokenizer that llguidance does not know."""
        return LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=self.end)


def compile_lark(lark: str, vocabulary: LLTokenizer) -> LLMatcher:
    """The grammar before its first token; `get_error()` of what is returned says what is wrong with it."""
    matcher = LLMatcher(vocabulary, lark, log_level=_SILENT, limits=LLParserLimits(max_lexer_states=MAX_LEXER_STATES))
    matcher.compute_bitmask()  # here rather than in a decode step: the first mask takes longest
    return matcher


class GrammarTrial:
    """Travels to the process that tries grammars, which keeps it with its vocabulary."""

    def __init__(self, vocabulary: Vocabulary, stack_bytes: int) -> None:
        """`stack_bytes` is less than the engine has, so that what passes here is far from its end there."""
        self._source = vocabulary
        self._stack_bytes = stack_bytes
        self._vocabulary: LLTokenizer | None = None

    def __call__(self, lark: str) -> str:
        """What is wrong with the grammar, empty if nothing is. This process may not live to tell."""
        vocabulary = self._vocabulary = self._vocabulary or self._source.read()
        outcome: list[str | BaseException] = []

        def work() -> None:
            try:
                outcome.append(_try(lark, vocabulary))
            except BaseException as error:  # raised to the caller; a panic of Rust code is no Exception
                outcome.append(error)

        before = threading.stack_size(self._stack_bytes)
        try:
            thread = threading.Thread(target=work)
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]


def _try(lark: str, vocabulary: LLTokenizer) -> str:
    compiled = compile_lark(lark, vocabulary)
    if compiled.is_error():
        return str(compiled.get_error())
    for seed in range(WALKS):
        _walk(compiled.deep_copy(), random.Random(seed))
    return ""


def _walk(matcher: LLMatcher, rng: random.Random) -> None:
    """An error on the way is that of an answer, not of the grammar: another answer may not meet it."""
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            return
        allowed = int.from_bytes(mask, "little")
        later = allowed >> (skipped := rng.randrange(8 * len(mask)))
        token = _lowest(later) + skipped if later else _lowest(allowed)
        if token < 0 or not matcher.consume_token(token):
            return


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set; -1 = none is."""
    return (bits & -bits).bit_length() - 1
