"""Answers that follow a grammar, whatever the model would rather say."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from tiny_models import TINY, byte_tokenizer, training_engine

from areal.api.errors import EngineError, RequestError
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference import grammar as grammar_module
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.fake import FakeEngine
from areal.engine.inference.grammar import GrammarCompiler
from areal.infra.rpc.wire import api_wire

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

PROMPT = [1, 2, 3]
END = 2
LIST = {
    "$defs": {"link": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}, "node": {
        "type": "object",
        "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 99}, "next": {"$ref": "#/$defs/link"}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }},
    "$ref": "#/$defs/node",
}  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["red", "green", 7, None]},
    "bounds": {"type": "integer", "minimum": -20, "maximum": 500},
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "ok": {"type": "boolean"},
            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        },
        "required": ["name", "ok"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "string", "enum": ["é", '"', "\n"]}, "minItems": 2, "maxItems": 4},
    "recursive": LIST,
    "special token in a text": {"const": "<|im_end|>"},
}


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder), byte_tokenizer())
    yield engine
    await engine.aclose()


def ask(grammar: Grammar | None, **settings: Any) -> ModelRequest:
    sampling = GenerationHyperparameters(**({"max_new_tokens": 800, "stop_token_ids": [END]} | settings))
    return ModelRequest("r", list(PROMPT), sampling, grammar=grammar)


def following(schema: dict[str, Any]) -> Grammar:
    """Without white space, which a greedy model might repeat forever."""
    return Grammar("json_schema", json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}}))


def text_of(answer: ModelResponse) -> str:
    """The text of an answer, without the end token."""
    ids = answer.output_tokens
    return str(byte_tokenizer().decode(ids[:-1] if ids[-1] == END else ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_random_model_writes_json_of_the_schema(engine: EmbeddedEngine, name: str) -> None:
    requests = [ask(following(SCHEMAS[name]), seed=seed) for seed in range(6)]
    answers = await asyncio.gather(*map(engine.agenerate, requests))
    for answer in answers:
        assert answer.stop_reason == "stop"
        assert answer.output_tokens[-1] == END
        jsonschema.validate(json.loads(text_of(answer)), SCHEMAS[name])


@pytest.mark.parametrize("settings", [{"greedy": True}, {"top_k": 1}, {"top_p": 0.01}, {"temperature": 5.0}])
async def test_any_way_of_sampling_stays_within_the_grammar(engine: EmbeddedEngine, settings: dict[str, Any]) -> None:
    answer = await engine.agenerate(ask(following(SCHEMAS["object"]), **settings))
    jsonschema.validate(json.loads(text_of(answer)), SCHEMAS["object"])


async def test_a_lark_grammar_names_tokens_by_number(engine: EmbeddedEngine) -> None:
    answer = await engine.agenerate(ask(Grammar("lark", 'start: <[3]> "ab" <[4]>')))
    assert text_of(answer) == "<tool_call>ab</tool_call>"


async def test_logprobs_are_those_of_what_the_grammar_leaves() -> None:
    runner = DecoderRunner(training_engine().decoder)
    engine = EmbeddedEngine(runner, byte_tokenizer())
    answer = await engine.agenerate(ask(Grammar("lark", 'start: ("a" | "b" | "c") "d"'), temperature=0.5))
    await engine.aclose()
    left = byte_tokenizer().encode("abc")
    among = (runner.prefill([0], [PROMPT])[0, left] / 0.5).log_softmax(-1)
    assert answer.output_logprobs[0] == pytest.approx(float(among[left.index(answer.output_tokens[0])]), abs=1e-5)
    assert answer.output_logprobs[1] == 0  # there was one token


async def test_an_answer_that_is_cut_off_says_so(engine: EmbeddedEngine) -> None:
    answer = await engine.agenerate(ask(following({"const": "a long text"}), max_new_tokens=5))
    assert answer.stop_reason == "length"
    assert text_of(answer) == '"a lo'


async def test_an_answer_that_is_complete_at_its_last_token_is_not_cut_off(engine: EmbeddedEngine) -> None:
    answer = await engine.agenerate(ask(Grammar("lark", 'start: "abc"'), max_new_tokens=3))
    assert answer.stop_reason == "stop"
    assert text_of(answer) == "abc"


async def test_a_complete_answer_ends_where_there_are_no_stop_tokens(engine: EmbeddedEngine) -> None:
    answer = await engine.agenerate(ask(Grammar("lark", 'start: "abc"'), stop_token_ids=[]))
    assert (answer.stop_reason, text_of(answer)) == ("stop", "abc")


async def test_min_new_tokens_gives_way_to_a_complete_grammar(engine: EmbeddedEngine) -> None:
    fixed = await engine.agenerate(ask(Grammar("lark", 'start: "abc"'), min_new_tokens=50))
    assert (fixed.stop_reason, text_of(fixed)) == ("stop", "abc")
    open_ended = await engine.agenerate(ask(Grammar("lark", "start: /a*/"), min_new_tokens=50, max_new_tokens=60))
    assert open_ended.output_len >= 50
    assert set(text_of(open_ended)) == {"a"}


async def test_a_stop_text_still_ends_the_answer(engine: EmbeddedEngine) -> None:
    answer = await engine.agenerate(ask(following({"const": "a long text"}), stop=["lo"]))
    assert (answer.stop_reason, text_of(answer)) == ("stop", '"a lo')


async def test_neighbours_of_a_constrained_request_draw_what_they_would(engine: EmbeddedEngine) -> None:
    free = ask(None, seed=3, max_new_tokens=40)
    alone = await engine.agenerate(free)
    constrained = [ask(following(SCHEMAS["recursive"]), seed=seed) for seed in range(3)]
    together, *_ = await asyncio.gather(*map(engine.agenerate, [free, *constrained]))
    assert together.output_tokens == alone.output_tokens


async def test_a_stream_follows_the_grammar_too(engine: EmbeddedEngine) -> None:
    chunks = [chunk async for chunk in engine.astream(ask(following(SCHEMAS["object"]), seed=1))]
    streamed = [token for chunk in chunks for token in chunk.tokens]
    whole = await engine.agenerate(ask(following(SCHEMAS["object"]), seed=1))
    assert streamed == whole.output_tokens


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (following({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (following({"type": "strin"}), "strin"),
        (following({"$ref": "#/$defs/gone"}), r"\$defs/gone"),
        (following({"type": "string", "pattern": "("}), "regex"),
        (following({"type": "string", "enum": [1]}), "Unsatisfiable"),
        (Grammar("lark", "start: nothing"), "nothing"),
        (Grammar("lark", "start: ("), "cannot be honoured"),
        (Grammar("json_schema", "[" * 5000), "cannot be honoured"),
    ],
)
async def test_an_impossible_grammar_is_refused_by_its_problem(
    engine: EmbeddedEngine, grammar: Grammar, problem: str
) -> None:
    with pytest.raises(RequestError, match=problem) as refusal:
        await engine.agenerate(ask(replace(grammar, origin="response_format")))
    assert str(refusal.value).startswith("response_format cannot be honoured: ")
    assert "\n" not in str(refusal.value)
    assert (await engine.agenerate(ask(None, max_new_tokens=4))).output_len > 0


async def test_a_grammar_that_fails_on_the_way_fails_its_own_request_only(engine: EmbeddedEngine) -> None:
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1000)}}
    too_complex = following({"type": "object", "properties": {"wide": wide}, "required": ["wide"]})
    outcomes = await asyncio.gather(
        engine.agenerate(ask(too_complex)), engine.agenerate(ask(None, max_new_tokens=4)), return_exceptions=True
    )
    assert isinstance(outcomes[0], RequestError)
    assert "the grammar cannot be honoured: " in str(outcomes[0])
    assert isinstance(outcomes[1], ModelResponse)
    health = await engine.health()
    assert (health.running, health.waiting) == (0, 0)


async def test_a_grammar_that_leaves_nothing_to_draw_is_an_error_not_a_hang(engine: EmbeddedEngine) -> None:
    with pytest.raises(RequestError, match="no token of this model continues"):
        await engine.agenerate(ask(Grammar("lark", 'start: ""'), stop_token_ids=[]))


async def test_grammars_without_a_tokenizer_are_refused() -> None:
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder))
    with pytest.raises(RequestError, match="tokenizer"):
        await engine.agenerate(ask(following({})))
    await engine.aclose()


async def test_an_engine_that_closes_while_a_grammar_is_compiled_says_so(engine: EmbeddedEngine) -> None:
    task = asyncio.create_task(engine.agenerate(ask(following({}))))
    await asyncio.sleep(0)
    await engine.aclose()
    with pytest.raises(EngineError, match="closed"):
        await task


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []
    compile_ = grammar_module._compile

    def count(grammar: Grammar, *rest: Any) -> Any:
        compiled.append(grammar)
        return compile_(grammar, *rest)

    monkeypatch.setattr(grammar_module, "_compile", count)
    monkeypatch.setattr(grammar_module, "MAX_GRAMMARS", 2)
    compiler = GrammarCompiler(byte_tokenizer(), TINY.vocab_size)
    one, two, three = (Grammar("lark", f'start: "{n}"') for n in range(3))
    for grammar in (one, one, two, one, three, one, two):
        compiler.begin_now(grammar)
    assert compiled == [one, two, three, two]  # `two` was the least recently used of the two that are kept


def test_answers_to_one_grammar_do_not_share_their_place() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), TINY.vocab_size)
    first, second = (compiler.begin_now(Grammar("lark", 'start: "ab"')) for _ in range(2))
    a, b = byte_tokenizer().encode("ab")
    first.advance(a)
    assert first.allowed([]).nonzero()[0].tolist() == [b]
    assert second.allowed([]).nonzero()[0].tolist() == [a]


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), TINY.vocab_size)
    allowed = compiler.begin_now(Grammar("lark", "start: /(?s:.)*/")).allowed([END])
    assert allowed.shape == (TINY.vocab_size,)
    assert not allowed[len(byte_tokenizer()) :].any()
    assert allowed[END]


def test_a_grammar_travels_with_its_request() -> None:
    wire = api_wire()
    request = ask(following(LIST))
    assert wire.unpack(wire.pack(request)) == request


async def test_the_fake_engine_follows_grammars() -> None:
    engine = FakeEngine(vocab_size=TINY.vocab_size, tokenizer=byte_tokenizer())
    for seed in range(5):
        answer = await engine.agenerate(ask(following(SCHEMAS["recursive"]), seed=seed))
        jsonschema.validate(json.loads(text_of(answer)), LIST)
    with pytest.raises(RequestError, match="tokenizer"):
        await FakeEngine().agenerate(ask(following({})))


@pytest.mark.parametrize(
    ("scripted", "problem"), [("7", "breaks the grammar"), ('"re', "ends before the grammar does")]
)
async def test_a_script_that_breaks_the_grammar_is_refused(scripted: str, problem: str) -> None:
    tokenizer = byte_tokenizer()
    grammar = following({"const": "red"})
    engine = FakeEngine(vocab_size=TINY.vocab_size, tokenizer=tokenizer, script=lambda _: tokenizer.encode(scripted))
    with pytest.raises(RequestError, match=problem):
        await engine.agenerate(ask(grammar))
    honest = FakeEngine(vocab_size=TINY.vocab_size, tokenizer=tokenizer, script=lambda _: tokenizer.encode('"red"'))
    assert text_of(await honest.agenerate(ask(grammar))) == '"red"'


def test_masks_reach_only_the_rows_that_have_one() -> None:
    """A guard for the sampler: a banned row must not touch its neighbour's log-probs."""
    from areal.engine.inference.sampler import SamplingParams, sample

    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    banned = torch.zeros(2, 8, dtype=torch.bool)
    banned[0, :7] = True
    params = SamplingParams.of_rows([(1.0, 1.0, 0, 5), (1.0, 1.0, 0, 6)])
    tokens, logprobs, _ = sample(logits, params, [0, 0], banned)
    free_tokens, free_logprobs, _ = sample(logits, params, [0, 0])
    assert tokens[0] == 7
    assert (tokens[1], logprobs[1]) == (free_tokens[1], free_logprobs[1])
    assert logprobs[0] == 0  # there was nothing else to draw
