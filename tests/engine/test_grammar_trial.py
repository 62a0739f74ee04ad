"""No grammar ends the engine: each is tried in a process of its own first, which may crash, hang or need everything."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tiny_models import byte_tokenizer, training_engine

from areal.api.errors import GrammarError, RequestError
from areal.api.io_struct import Grammar, ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference import grammar as grammar_module
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.grammar import TRIAL_LIMITS, TRIED_AT_ONCE, GrammarCompiler
from areal.utils.process_pool.pool import SHARED, Limits, ProcessPool

pytestmark = pytest.mark.slow

WAIT_SECONDS = 60
SIMPLE = Grammar("lark", 'start: "ab"')


def chain_of_schemas(length: int, link: Any, **root: Any) -> Grammar:
    """Each schema refers to the next by `link`, so that nothing but the references is nested."""
    schemas = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    schema = {"$defs": schemas | {f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"} | root
    return Grammar("json_schema", json.dumps(schema), "response_format")


def lark(text: str) -> Grammar:
    return Grammar("lark", text, "the workflow's grammar")


DEEP = {
    "references": chain_of_schemas(20_000, lambda next_: next_),
    "properties": chain_of_schemas(2000, lambda next_: {"type": "object", "properties": {"a": next_}}),
    "items": chain_of_schemas(3000, lambda next_: {"type": "array", "items": next_}),
    "choices": chain_of_schemas(5000, lambda next_: {"anyOf": [next_, {"type": "boolean"}]}),
    "intersections": chain_of_schemas(4000, lambda next_: {"allOf": [next_, {"type": "null"}]}),
    "rules": lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(30_000)) + '\nr30000: "a"'),
    "terminals": lark("start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(30_000)) + '\nT30000: "a"'),
}
"""Each ended the process that compiled it with a segmentation fault."""


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder), byte_tokenizer())
    yield engine
    await engine.aclose()


def compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer, len(tokenizer))


def ask(grammar: Grammar | None) -> ModelRequest:
    return ModelRequest("r", [1, 2, 3], GenerationHyperparameters(max_new_tokens=4), grammar=grammar)


def processes() -> list[int]:
    return SHARED.get(TRIED_AT_ONCE, TRIAL_LIMITS).supervisors()


@pytest.mark.parametrize("name", DEEP)
async def test_engine_outlives_a_grammar_that_crashes_its_compiler(engine: EmbeddedEngine, name: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(RequestError, match="a trial of this one ended with SIGSEGV; make the schema sm") as refusal:
            await engine.agenerate(ask(DEEP[name]))
        assert str(refusal.value).startswith(f"{DEEP[name].origin} cannot be honoured: ")
        assert (await engine.agenerate(ask(SIMPLE))).output_len > 0


def test_a_grammar_that_crashed_is_refused_again_without_another_trial() -> None:
    grammars = compiler()
    for origin in ("response_format", "response_format", "tool_choice"):
        with pytest.raises(GrammarError, match=f"^{origin} cannot be honoured: .* SIGSEGV"):
            grammars.begin_now(Grammar("json_schema", DEEP["properties"].text, origin))
        before = processes()
        assert before
    grammars.begin_now(SIMPLE)
    assert processes() == before


def test_a_grammar_that_is_tried_is_not_tried_again_when_it_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_GRAMMARS", 1)
    grammars = compiler()
    grammars.begin_now(SIMPLE)
    grammars.begin_now(lark('start: "other"'))
    monkeypatch.setattr(grammar_module, "TRIAL_SECONDS", -1.0)  # which no pool takes
    grammars.begin_now(SIMPLE)


def test_a_trial_that_was_killed_from_outside_is_not_held_against_the_grammar() -> None:
    pool = ProcessPool(1)
    try:
        crash = pool.submit(os.kill, [0, signal.SIGKILL], timeout_seconds=WAIT_SECONDS)
        problem, is_lasting = grammar_module._verdict(crash)
        assert problem.startswith("it could not be tried (")
        assert not is_lasting
    finally:
        pool.close()


def test_a_trial_that_needs_too_much_memory_is_ended() -> None:
    pool = ProcessPool(1, Limits(memory_bytes=1 << 30))
    try:
        greedy = pool.submit(bytearray, [4 << 30], timeout_seconds=WAIT_SECONDS)
        assert grammar_module._verdict(greedy) == (grammar_module._TOO_LARGE, True)
    finally:
        pool.close()


PATTERNS = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{count}}}$"} for count in range(1, 30)]
LONG = {
    "intersected patterns": Grammar("json_schema", json.dumps({"allOf": PATTERNS}), "response_format"),
    "optional parts": lark("start: " + " ".join(['"a"?'] * 20_000)),
}
"""The first, of 2 kB, was not ready after 27 s of computing and 2 GB of memory; the second takes five seconds."""


@pytest.mark.parametrize("name", LONG)
def test_a_grammar_that_takes_too_long_to_compile_is_refused_for_good(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    limits = Limits(memory_bytes=1 << 30, cpu_seconds=1)
    monkeypatch.setattr(grammar_module, "TRIAL_LIMITS", limits)
    monkeypatch.setattr(grammar_module, "TRIAL_SECONDS", WAIT_SECONDS)
    grammars = compiler()
    for _ in range(2):
        with pytest.raises(GrammarError, match="s of computing, and this one was not; make the schema simpler"):
            grammars.begin_now(LONG[name])
        monkeypatch.setattr(grammar_module, "TRIAL_SECONDS", -1.0)  # which no pool takes: there is no second trial


def test_a_trial_that_a_busy_machine_did_not_finish_may_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = compiler()
    grammars.begin_now(SIMPLE)
    wide = lark("start: " + " | ".join(f'"a{i}"' for i in range(3000)))
    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "TRIAL_SECONDS", 1e-4)
        with pytest.raises(GrammarError, match="on this busy machine; ask again"):
            grammars.begin_now(wide)
    grammars.begin_now(wide)


def test_a_grammar_that_this_process_could_only_just_compile_is_refused() -> None:
    """The trial has half the stack: what passes there does not end here, where more may be on the stack already."""
    link = {"type": "object", "required": ["a"]}
    just = chain_of_schemas(600, lambda next_: link | {"properties": {"a": next_}})
    with pytest.raises(GrammarError, match="SIGSEGV"):
        compiler().begin_now(just)
    compiler().begin_now(chain_of_schemas(60, lambda next_: link | {"properties": {"a": next_}}))


def test_the_process_that_tries_grammars_loads_nothing_heavy() -> None:
    code = "import sys, areal.engine.inference.grammar_trial\n"
    code += "heavy = {'torch', 'numpy', 'transformers', 'asyncio'} & set(sys.modules)\nassert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stderr
