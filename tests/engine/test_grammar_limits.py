"""Grammars that would take too long, or too much, are refused by the name of the parameter that asked for them."""

import asyncio
import json
import threading
from typing import Any

import pytest
from tiny_models import byte_tokenizer

from areal.api.errors import GrammarError
from areal.api.io_struct import Grammar
from areal.engine.inference import grammar as grammar_module
from areal.engine.inference.grammar import MAX_GRAMMAR_CHARACTERS, GrammarCompiler

pytestmark = pytest.mark.slow

WAIT_SECONDS = 10


def compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer, len(tokenizer))


def schema_of(**schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), "response_format")


async def test_grammar_beyond_the_size_is_refused() -> None:
    with pytest.raises(GrammarError, match=r"^response_format cannot be honoured: a grammar may have 1048576 char"):
        await compiler().begin(schema_of(enum=["x" * MAX_GRAMMAR_CHARACTERS]))


async def test_grammar_that_is_not_ready_in_time_is_refused_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compile_now = compiler(), grammar_module._compile
    slow, quick = schema_of(const="slow"), schema_of(const="quick")
    released = threading.Event()

    def compile_slowly(grammar: Grammar, vocabulary: Any) -> Any:
        if grammar == slow:
            assert released.wait(WAIT_SECONDS)
        return compile_now(grammar, vocabulary)

    monkeypatch.setattr(grammar_module, "_compile", compile_slowly)
    await grammars.begin(quick)
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.05)
    with pytest.raises(
        GrammarError, match=r"^response_format cannot be honoured: a grammar must be ready within 0\.05"
    ):
        await grammars.begin(slow)
    assert (await grammars.begin(quick)).allowed([]).any()
    released.set()
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", WAIT_SECONDS)
    async with asyncio.timeout(WAIT_SECONDS):
        assert (await grammars.begin(slow)).allowed([]).any()


async def test_many_who_wait_for_one_grammar_leave_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compile_now = compiler(), grammar_module._compile
    slow = schema_of(const="slow")
    released, began = threading.Event(), threading.Event()

    def compile_slowly(grammar: Grammar, vocabulary: Any) -> Any:
        if grammar == slow:
            began.set()
            assert released.wait(WAIT_SECONDS)
        return compile_now(grammar, vocabulary)

    monkeypatch.setattr(grammar_module, "_compile", compile_slowly)
    await grammars.begin(schema_of(const="first"))
    waiting = [asyncio.ensure_future(grammars.begin(slow))]
    assert await asyncio.to_thread(began.wait, WAIT_SECONDS)
    waiting += [asyncio.ensure_future(grammars.begin(slow)) for _ in range(8)]
    waiting[1].cancel()
    async with asyncio.timeout(WAIT_SECONDS):
        assert (await grammars.begin(schema_of(const="other"))).allowed([]).any()
        assert not waiting[0].done()
        released.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results.pop(1), asyncio.CancelledError)
    assert all(state.allowed([]).any() for state in results)
