"""Which tokens may come next in an answer that must follow a grammar. Needs no torch.

llguidance compiles each grammar once for one tokenizer, in a thread; every answer then advances its own copy. A grammar
decides which tokens may come next and whether the answer may end; which tokens end it is up to the request.

A grammar may be anyone's, and some end the process that compiles them, or keep it busy without end. Each is therefore
tried in another process first (`grammar_trial`), with limits; one that does not survive there is refused here.
"""

import asyncio
import hashlib
import resource
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from areal.api.errors import GrammarError, RequestError
from areal.api.io_struct import Grammar
from areal.api.messages import Array
from areal.engine.inference.grammar_trial import GrammarTrial, Vocabulary, compile_lark
from areal.utils.background import Background
from areal.utils.bounded_cache import BoundedCache
from areal.utils.process_pool.pool import (
    SHARED,
    CallCrashed,
    CallError,
    CallExhausted,
    CallFailed,
    CallTimeout,
    Limits,
    LoadFailed,
    PackedFunction,
)

MAX_GRAMMARS = 64
"""Compiled grammars kept; the least recently used is dropped beyond this."""
MAX_GRAMMAR_CHARACTERS = 1 << 20
COMPILE_SECONDS = 60.0
"""A request whose grammar is not ready by then is refused. What a grammar may cost is bounded by `TRIAL_LIMITS`: this
only ends the wait on a machine that is too busy."""
COMPILED_AT_ONCE = 4
TRIED_AT_ONCE = 2
"""Processes that try grammars, shared by the engines of this process; the second starts when the first is busy."""
TRIAL_LIMITS = Limits(memory_bytes=1 << 30, cpu_seconds=8)
"""Compiling once more in this process must also fit into `COMPILE_SECONDS`."""
TRIAL_SECONDS = 45.0
"""On a machine that is busy; from the moment a trial begins."""
MAX_VERDICTS = 4096
"""Grammars of which it is remembered how their trial ended."""


class GrammarState:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: list[int], grammar: Grammar) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self.grammar = grammar
        self.origin = grammar.origin

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


def must_go_on(drawn: int, min_new_tokens: int, grammar: GrammarState | None) -> bool:
    """An answer of so many tokens may not end with the next, unless a complete grammar leaves nothing else to draw."""
    return drawn < min_new_tokens and (grammar is None or not grammar.complete)


def banned_tokens(
    vocab_size: int, stops: Collection[int], drawn: int, min_new_tokens: int, grammar: GrammarState | None
) -> Array | None:
    """The tokens that may not follow the `drawn` ones of an answer, bool [V]; None if there are none.

    Engines draw by this, and the trainer works it out again from the tokens that were drawn. Raises GrammarError.
    """
    goes_on = must_go_on(drawn, min_new_tokens, grammar)
    if grammar is not None:
        return ~grammar.allowed(() if goes_on else stops)
    if not (stops and goes_on):
        return None
    banned = np.zeros(vocab_size, dtype=np.bool_)
    banned[list(stops)] = True
    return banned


class GrammarCompiler:
    """Grammars for one tokenizer, each compiled on first use. Threads may share it: locks guard what it holds."""

    def __init__(self, tokenizer: Any, vocab_size: int, *, trusted: bool = False) -> None:
        """`vocab_size` is the model's; tokens that the tokenizer does not have are never allowed.

        `trusted`: an engine has compiled these grammars before, so they need no trial.
        """
        self._tokens = _Tokens(tokenizer, vocab_size)
        self._vocab_size = vocab_size
        self._trusted = trusted
        self._trials = _Trials(self._tokens)
        self._compiled: BoundedCache[Grammar, Future[LLMatcher]] = BoundedCache(MAX_GRAMMARS)
        self._lock = threading.Lock()
        self._background = Background(COMPILED_AT_ONCE, "areal grammar")

    async def begin(self, grammar: Grammar) -> GrammarState:
        """The state before an answer's first token. Raises GrammarError that says what is wrong with the grammar."""
        with self._lock:
            known = self._compiled.get(grammar)
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

    def begin_now(self, grammar: Grammar) -> GrammarState:
        """The same in the calling thread."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            is_new = compiled is None
            if compiled is None:
                compiled = Future()
                self._compiled.put(grammar, compiled)
        if is_new:
            self._compile_into(compiled, grammar)
        return self._state(compiled.result(), grammar)

    def _state(self, compiled: LLMatcher, grammar: Grammar) -> GrammarState:
        ends = [token for token in self._tokens.read().eos_tokens if token < self._vocab_size]
        return GrammarState(compiled.deep_copy(), self._vocab_size, ends, grammar)

    def _compile_into(self, compiled: "Future[LLMatcher]", grammar: Grammar) -> None:
        """Outside the lock, so that a big grammar delays only the requests that ask for it."""
        try:
            compiled.set_result(self._try_and_compile(grammar))
        except BaseException as error:
            compiled.set_exception(error)
            with self._lock:
                self._compiled.drop(grammar)

    def _try_and_compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise _refusal(
                grammar,
                f"a grammar may have {MAX_GRAMMAR_CHARACTERS} characters, got {len(grammar.text)}; "
                "make the schema smaller",
            )
        if self._trusted:
            return _compile(grammar, self._tokens.read())
        problem_of_trial = self._trials.begin(as_lark(grammar))
        vocabulary = self._tokens.read()  # while the trial runs
        if problem := problem_of_trial():
            raise _refusal(grammar, problem)
        return _compile(grammar, vocabulary)


class _Tokens:
    """The tokenizer as llguidance reads it, made on first use: a big vocabulary takes a second."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._trial: PackedFunction | None = None
        self._source: Vocabulary | None = None
        self._read: LLTokenizer | None = None

    def trial(self) -> PackedFunction:
        """Raises RequestError if grammars cannot be used with the tokenizer, as `read` does."""
        with self._lock:
            if self._trial is None:
                self._source = self._source or self._as_text()
                self._trial = PackedFunction.of(GrammarTrial(self._source, _trial_stack_bytes()))
            return self._trial

    def read(self) -> LLTokenizer:
        if self._read is not None:
            return self._read
        with self._lock:
            self._source = self._source or self._as_text()
            if self._read is None:
                try:
                    self._read = self._source.read()
                except ValueError as error:
                    raise RequestError(f"grammars cannot be used with this model's tokenizer: {error}") from error
            return self._read

    def _as_text(self) -> Vocabulary:
        core = getattr(self._tokenizer, "backend_tokenizer", None)
        if core is None:
            raise RequestError(
                "grammars need an engine with a fast (Rust) tokenizer; ask for an answer without a grammar"
            )
        own = type(core).from_str(core.to_str())  # a copy: what follows must not change how prompts are encoded
        own.no_padding()
        own.no_truncation()
        size = max(self._vocab_size, own.get_vocab_size(with_added_tokens=True))
        return Vocabulary(own.to_str(), size, self._tokenizer.eos_token_id)


class _Trials:
    """What came of trying grammars in a process of their own, for one tokenizer."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens = tokens
        self._verdicts: BoundedCache[bytes, str] = BoundedCache(MAX_VERDICTS)
        self._lock = threading.Lock()

    def begin(self, lark: str) -> Callable[[], str]:
        """Start a trial. What is returned waits for its end and says what is wrong; empty = nothing is."""
        key = hashlib.blake2b(lark.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            known = self._verdicts.get(key)
        if known is not None:
            return lambda: known
        trial = SHARED.get(TRIED_AT_ONCE, TRIAL_LIMITS).submit(
            self._tokens.trial(), [lark], timeout_seconds=TRIAL_SECONDS
        )

        def problem() -> str:
            found, is_lasting = _verdict(trial)
            if is_lasting:
                with self._lock:
                    self._verdicts.put(key, found)
            return found

        return problem


def _verdict(trial: "Future[Any]") -> tuple[str, bool]:
    """What is wrong with the grammar, and whether it would be found again: a trial may also fail for no fault of it."""
    try:
        error = str(trial.result())
        return (_reason(error) if error else ""), True
    except CallExhausted:
        return _TOO_LARGE, True
    except CallTimeout:  # not by its own computing, or that would have ended it sooner: the machine is busy
        return f"a grammar must be ready after {TRIAL_SECONDS:g} s on this busy machine; ask again", False
    except CallCrashed as crash:
        if crash.status == -signal.SIGXCPU:
            return _TOO_SLOW, True
        if crash.status is None or crash.status >= 0 or crash.status == -signal.SIGKILL:
            return f"it could not be tried ({crash}); ask again", False
        name = signal.Signals(-crash.status).name
        return _CRASHED.format(name), True
    except LoadFailed as failure:
        return f"it could not be tried ({failure.kind}: {failure.text}); ask for an answer without a grammar", False
    except CallFailed as failure:
        return _reason(f"{failure.kind}: {failure.text}"), True
    except CallError as failure:
        return f"it could not be tried ({failure}); ask again", False


_TOO_SLOW = (
    f"a grammar must be compiled after {TRIAL_LIMITS.cpu_seconds:g} s of computing, and this one was not; "
    "make the schema simpler"
)
_TOO_LARGE = f"a grammar may take {TRIAL_LIMITS.memory_bytes} bytes of memory, and this one needs more; make it smaller"
_CRASHED = (
    "a grammar must not end the process that compiles it, and a trial of this one ended with {}; "
    "make the schema smaller, and its references and rules less deep"
)


def _trial_stack_bytes() -> int:
    """Half of what a thread of this process has, and not more than 4 MiB."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    ours = 2 << 20 if limit == resource.RLIM_INFINITY else limit  # the C library's choice where there is no limit
    return max(min(ours // 2, 4 << 20), 256 << 10) & -4096


# Forced text would be spelled as the tokenizer encodes it, which for a schema that quotes a special token is that very
# token; without forcing, text is text and every spelling of it is the model's own choice.
_OPTIONS = '%llguidance {"no_forcing": true}\n'


def as_lark(grammar: Grammar) -> str:
    """The text that llguidance compiles."""
    return _OPTIONS + (f"start: %json {grammar.text}" if grammar.kind == "json_schema" else grammar.text)


def _compile(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """In this process."""
    matcher = compile_lark(as_lark(grammar), vocabulary)
    if matcher.is_error():
        raise _refusal(grammar, _reason(matcher.get_error()))
    return matcher


def _refusal(grammar: Grammar, problem: str) -> GrammarError:
    return GrammarError(f"{grammar.origin} cannot be honoured: {problem}")


_MAX_REASON = 200
"""Characters of llguidance's message that are passed on: it may quote a whole pattern."""


def _reason(error: str) -> str:
    """llguidance's message without the grammar and the parser's state, which it quotes."""
    text = error.rpartition("failed to compile JSON schema: ")[2]
    text = text.partition("\n   1 | ")[0].partition("\n<state>")[0]
    return " ".join(text.split())[:_MAX_REASON]
