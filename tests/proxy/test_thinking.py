"""Thinking is kept apart from the answer in every dialect, and belongs to its turn when it comes back."""

import asyncio
import copy

import pytest
from anthropic.types import Message
from conversations import ADD, CALL, QUESTION
from openai.types.responses import Response

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
ANSWER = "<think>\nfirst 1, then 2\n</think>\n\n1259"


@pytest.fixture
async def engine(engine, tokenizer):
    engine.tokenizer = copy.deepcopy(tokenizer)
    engine.tokenizer.chat_template = TEMPLATE
    engine.answer = ANSWER
    return engine


async def test_chat_has_thinking_next_to_the_content(client, session):
    message = (await client.chat.completions.create(model="m", messages=[QUESTION])).choices[0].message
    assert (message.content, message.reasoning_content) == ("1259", "first 1, then 2")
    again = [QUESTION, message.model_dump(), {"role": "user", "content": "again"}]
    await client.chat.completions.create(model="m", messages=again)
    assert session.tree.last.parent == 0
    assert session.tree.last.extends


async def test_chat_streams_thinking_first(client):
    stream = await client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
    async with asyncio.timeout(10):
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "first 1, then 2"
    assert "".join(delta.content or "" for delta in deltas) == "1259"


async def test_response_has_thinking_as_an_item(client, session):
    response = await client.responses.create(model="m", input="Sort 5291")
    Response.model_validate(response.model_dump())
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "first 1, then 2")
    assert message.content[0].text == "1259"
    items = [QUESTION, *(item.model_dump() for item in response.output), {"role": "user", "content": "again"}]
    await client.responses.create(model="m", input=items)
    assert session.tree.last.parent == 0


async def test_response_streams_thinking_as_an_item(client):
    async with asyncio.timeout(10):
        stream = await client.responses.create(model="m", input="Sort 5291", stream=True)
        events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "first 1, then 2"
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    assert events[-1].response.output[0].content[0].text == "first 1, then 2"


async def test_message_has_thinking_as_a_block(claude, session):
    message = await claude.messages.create(model="m", messages=[QUESTION], max_tokens=64)
    Message.model_validate(message.model_dump())
    thought, text = message.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "first 1, then 2", "1259")
    turns = [QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": "again"}]
    await claude.messages.create(model="m", messages=turns, max_tokens=64)
    assert session.tree.last.parent == 0


async def test_message_streams_thinking_as_a_block(claude):
    async with asyncio.timeout(10), claude.messages.stream(model="m", messages=[QUESTION], max_tokens=64) as events:
        message = await events.get_final_message()
    assert [(block.type, getattr(block, "thinking", None)) for block in message.content] == [
        ("thinking", "first 1, then 2"),
        ("text", None),
    ]


async def test_tool_call_after_thinking_is_a_call(client, engine):
    engine.answer = f"<think>\nadd\n</think>\n\n{CALL}"
    stream = await client.chat.completions.create(
        model="m", messages=[QUESTION], tools=[ADD], stream=True, max_tokens=200
    )
    async with asyncio.timeout(10):
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
