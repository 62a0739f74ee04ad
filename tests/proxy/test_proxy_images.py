"""Images in all three dialects, sent by the official SDKs: the same ids, the same bytes, the same trace."""

import base64
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tiny_processor import POSITIONS, TOKENS_PER_IMAGE, data_url, png

from areal.proxy import ArealOpenAI, Proxy, Session
from areal.trajectory import export, transcript
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer

RED, BLUE = png("red"), png("blue")


@pytest.fixture(scope="module")
def image_processor(vision_directory: Path) -> Any:
    return load_hf_processor(vision_directory)


@pytest.fixture(scope="module")
def tokenizer(vision_directory: Path) -> Any:
    return load_hf_tokenizer(vision_directory)


@pytest.fixture
async def proxy(start_proxy: Any, image_processor: Any) -> Proxy:
    started: Proxy = await start_proxy(max_positions=POSITIONS, processor=image_processor)
    return started


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "auto"}}


def question(*images: bytes) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "What is this?"}, *(part(data) for data in images)]
    return [{"role": "user", "content": content}]


def source(data: bytes) -> dict[str, Any]:
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()},
    }


async def test_three_dialects_send_the_same_image(
    client: AsyncOpenAI, claude: AsyncAnthropic, session: Session, engine: Any, image_processor: Any
) -> None:
    chat = await client.chat.completions.create(model="m", messages=question(RED))
    items = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": data_url(RED)}]
    written = await client.responses.create(model="m", input=[{"role": "user", "content": items}])
    blocks = [{"type": "text", "text": "What is this?"}, source(RED)]
    message = await claude.messages.create(model="m", max_tokens=64, messages=[{"role": "user", "content": blocks}])
    first, *others = engine.requests
    assert first.images == [RED]
    assert first.input_ids.count(image_processor.image_token_id) == TOKENS_PER_IMAGE
    for other in others:
        assert (other.input_ids, other.images) == (first.input_ids, [RED])
    assert chat.usage.prompt_tokens == written.usage.input_tokens == message.usage.input_tokens == len(first.input_ids)
    assert len({id(node.images[0]) for node in session.tree.completions}) == 1


async def test_conversation_with_images_goes_on_with_the_ids_it_had(
    client: AsyncOpenAI, session: Session, engine: Any
) -> None:
    messages = question(RED)
    for more in (question(BLUE), question()):
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages = [*messages, answer.choices[0].message.model_dump(), *more]
    await client.chat.completions.create(model="m", messages=messages)
    first, second, third = engine.requests
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    assert third.input_ids[: len(second.input_ids)] == second.input_ids
    assert [len(node.images) for node in session.tree.completions] == [1, 1, 0]
    assert third.images == [RED, BLUE]
    assert [row.images for row in export(session.tree, "concat", 1.0)] == [[RED, BLUE]]
    assert transcript(session.tree)[0]["content"] == "What is this?[image 40x32 png]"


async def test_remembered_conversation_keeps_its_images(client: AsyncOpenAI, engine: Any) -> None:
    items = [{"type": "input_image", "image_url": data_url(RED)}]
    first = await client.responses.create(model="m", input=[{"role": "user", "content": items}])
    await client.responses.create(model="m", input="Sure?", previous_response_id=first.id)
    assert engine.requests[1].images == [RED]


async def test_streamed_call_has_its_images(client: AsyncOpenAI, engine: Any) -> None:
    stream = await client.chat.completions.create(model="m", messages=question(RED), stream=True)
    assert [chunk async for chunk in stream]
    assert engine.requests[0].images == [RED]


async def test_tool_result_may_be_an_image(claude: AsyncAnthropic, engine: Any) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [source(BLUE)]}
    turns = [("user", "Look."), ("assistant", [call]), ("user", [result])]
    messages = [{"role": role, "content": content} for role, content in turns]
    await claude.messages.create(model="m", max_tokens=64, messages=messages)
    assert engine.requests[0].images == [BLUE]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.org/cat.png", "nothing is downloaded here: fetch it yourself"),
        ("/etc/hostname", "must be a data URL"),
        ("file:///etc/hostname", "must be a data URL"),
        (data_url(b"hello"), "must be PNG"),
        (data_url(RED[:-40]), "must be whole"),
    ],
)
async def test_image_that_cannot_be_used_is_refused(
    client: AsyncOpenAI, engine: Any, session: Session, url: str, says: str
) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError, match=says):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
    assert not engine.requests
    assert not session.tree.completions


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_images_come_from_users_and_tools_only(client: AsyncOpenAI, role: str) -> None:
    messages = [{"role": role, "content": [part(RED)]}, *question()]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="m", messages=messages)
    assert refused.value.param == "messages[0].content[0]"


async def test_model_without_a_processor_refuses_images_by_name(engine: Any, tokenizer: Any) -> None:
    async with ArealOpenAI(engine, tokenizer) as blind:
        with pytest.raises(openai.BadRequestError, match="this model takes no images") as refused:
            await blind.chat.completions.create(model="m", messages=question(RED))
    assert refused.value.param == "messages[0].content[1]"


async def test_direct_client_exports_images(engine: Any, tokenizer: Any, image_processor: Any) -> None:
    async with ArealOpenAI(engine, tokenizer, processor=image_processor) as direct:
        answer = await direct.chat.completions.create(model="m", messages=question(RED))
        exported = direct.export_interactions()[answer.id]
    assert exported.row.images == [RED]
    assert exported.messages[0]["content"] == "What is this?[image 40x32 png]"
