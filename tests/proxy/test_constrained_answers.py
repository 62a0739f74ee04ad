"""Demands on answers, through the SDKs, on a model that knows nothing: they hold all the same."""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import jsonschema
import numpy as np
import openai
import pytest
import torch
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from areal.config.rollout import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.grammar import GrammarCompiler
from areal.engine.model.architecture import Architecture
from areal.engine.model.decoder import Decoder, initialise
from areal.engine.training.choices import ChoiceReader
from areal.engine.training.engine import ScoringEngine, TokenBatch
from areal.engine.training.packing import PackedDecoder, Span
from areal.engine.training.token_sets import FIELD
from areal.proxy import Proxy, Session
from areal.trajectory import export

pytestmark = pytest.mark.slow

POSITIONS = 4096
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


class Weather(BaseModel):
    unit: Literal["C", "F"]
    days: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def untrained() -> tuple[Decoder, Any]:
    tokenizer = make_tokenizer(["How is the weather today, and how many days will it last?"], 300, POSITIONS)
    decoder = Decoder(
        Architecture(
            family="qwen3",
            vocab_size=320,
            hidden_size=16,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            intermediate_size=32,
            max_positions=POSITIONS,
            tied_embeddings=True,
        )
    )
    initialise(decoder, torch.Generator().manual_seed(1))
    return decoder, tokenizer


@pytest.fixture
async def proxy(untrained: tuple[Decoder, Any]) -> AsyncIterator[Proxy]:
    decoder, tokenizer = untrained
    engine = EmbeddedEngine(DecoderRunner(decoder), tokenizer)
    sampling = GenerationHyperparameters(max_new_tokens=1500)
    proxy = Proxy(engine, tokenizer, gconfig=sampling, max_positions=POSITIONS)
    await proxy.start()
    yield proxy
    await proxy.aclose()
    await engine.aclose()


@pytest.fixture
def transport() -> str:
    return "in process"


def check(call: Any) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    jsonschema.validate(json.loads(call.arguments), schemas[call.name])


async def test_required_tool_calls_are_made(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model="any", messages=QUESTION, tools=TOOLS, tool_choice="required", n=4, seed=1
    )
    for choice in completion.choices:
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            check(call.function)


async def test_a_named_tool_is_called_once_where_calls_are_not_parallel(client: AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    completion = await client.chat.completions.create(
        model="any", messages=QUESTION, tools=TOOLS, tool_choice=named, parallel_tool_calls=False, n=4, seed=2
    )
    for choice in completion.choices:
        (call,) = choice.message.tool_calls or ()
        assert call.function.name == "get_weather"  # type: ignore[union-attr]
        check(call.function)  # type: ignore[union-attr]


async def test_a_pydantic_model_is_filled(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.parse(
        model="any", messages=QUESTION, response_format=Weather, n=4, seed=3
    )
    assert all(isinstance(choice.message.parsed, Weather) for choice in completion.choices)


async def test_a_json_object_is_one_or_is_cut_off(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model="any", messages=QUESTION, response_format={"type": "json_object"}, n=6, seed=4, max_tokens=400
    )
    for choice in completion.choices:
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


async def test_an_answer_cut_off_in_the_middle_says_so_and_is_no_call(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model="any", messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=6
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls


async def test_the_responses_dialect_honours_formats_and_choices(client: AsyncOpenAI) -> None:
    parsed = await client.responses.parse(model="any", input="How is the weather?", text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
    response = await client.responses.create(model="any", input="Well?", tools=tools, tool_choice="required")
    assert response.output
    for item in response.output:
        assert item.type == "function_call"
        check(item)


async def test_the_messages_dialect_honours_choices(claude: AsyncAnthropic) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}, {"name": "now", "input_schema": {"type": "object"}}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = await claude.messages.create(
            model="any",
            messages=QUESTION,
            max_tokens=1500,
            tools=tools[:1],
            tool_choice=choice,  # type: ignore[arg-type]
        )
        assert message.stop_reason == "tool_use"
        for block in message.content:
            assert block.type == "tool_use"
            jsonschema.validate(block.input, SCHEMA)


async def test_a_stream_holds_to_it_too(client: AsyncOpenAI, session: Session) -> None:
    async with client.chat.completions.stream(
        model="any", messages=QUESTION, tools=TOOLS, tool_choice="required", seed=5
    ) as stream:
        completion = await stream.get_final_completion()
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls or ():
        check(call.function)
    (node,) = session.tree.completions
    assert node.stop_reason == "stop"


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"response_format": {"schema": {"type": "array", "uniqueItems": True}}}, "response_format"),
        ({"tools": {"type": "object", "properties": {"a": {"not": {}}}}}, "tools"),
    ],
)
async def test_a_strict_schema_that_cannot_be_held_is_refused_by_name(
    client: AsyncOpenAI, wanted: dict[str, Any], name: str
) -> None:
    parameters: Any = {}
    if "tools" in wanted:
        function = {"name": "f", "parameters": wanted["tools"], "strict": True}
        parameters["tools"] = [{"type": "function", "function": function}]
    else:
        described = {"name": "x", "strict": True, **wanted["response_format"]}
        parameters["response_format"] = {"type": "json_schema", "json_schema": described}
    with pytest.raises(openai.BadRequestError, match=f"{name} cannot be honoured: Unimplemented keys") as refusal:
        await client.chat.completions.create(model="any", messages=QUESTION, **parameters)
    assert refusal.value.param == name


@pytest.mark.parametrize("style", ["individual", "concat"])
async def test_rows_have_the_trainers_log_probs_whatever_a_call_demanded(
    client: AsyncOpenAI, session: Session, untrained: tuple[Decoder, Any], style: Literal["individual", "concat"]
) -> None:
    messages, answers = list(QUESTION), 0
    for demand in (
        {"response_format": {"type": "json_object"}, "max_tokens": 60},
        {"tools": TOOLS, "tool_choice": "required", "temperature": 0.7},
        {"top_p": 0.8, "max_tokens": 20},
        {"top_p": 0.9, "temperature": 1.3, "tools": TOOLS, "tool_choice": "required"},
        {"temperature": 0, "max_tokens": 5},
        {"max_tokens": 20},
    ):
        completion = await client.chat.completions.create(model="any", messages=messages, seed=6, **demand)  # type: ignore[call-overload]
        messages += [completion.choices[0].message.model_dump(exclude_none=True)]
        for call in completion.choices[0].message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
        messages.append({"role": "user", "content": "And then?"})
        answers += 1
    assert len(session.tree.completions) == answers
    decoder, tokenizer = untrained
    rows = export(session.tree, style, 1.0)
    reader = ChoiceReader(lambda: GrammarCompiler(tokenizer, 320, trusted=True))
    found = reader.read(rows)
    assert found is not None
    batch = TokenBatch(
        [Span(row.input_ids, np.flatnonzero(row.loss_mask), number) for number, row in enumerate(rows)],
        torch.from_numpy(np.concatenate([row.temperatures[row.loss_mask] for row in rows])),
        {FIELD: found[1]},
        sets=found[0],
    )
    scorer = PackedDecoder(decoder.architecture)
    scorer.flat.copy_(decoder.flat)
    computed = ScoringEngine(scorer).logprobs(batch)
    reported = torch.from_numpy(np.concatenate([row.logprobs[row.loss_mask] for row in rows]))
    single = found[0].single[found[1]]
    torch.testing.assert_close(computed[~single], reported[~single], atol=1e-4, rtol=0)
    assert single.sum() > 10  # the greedy answer, and what a schema dictates
