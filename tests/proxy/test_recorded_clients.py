"""Requests recorded from real clients, answered so that the official SDKs' types accept the answer in strict mode."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from anthropic.types import Message, RawMessageStreamEvent
from conversations import CALL
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.model.architecture import Architecture
from areal.engine.model.decoder import Decoder, initialise
from areal.proxy import Proxy, Session

pytestmark = pytest.mark.slow

RECORDED = sorted((Path(__file__).parent / "clients").glob("*.json"))
WHOLE: dict[str, Any] = {"completions": ChatCompletion, "responses": Response, "messages": Message}
STREAMED: dict[str, Any] = {
    "completions": ChatCompletionChunk,
    "responses": ResponseStreamEvent,
    "messages": RawMessageStreamEvent,
}

UNTRAINED = Architecture(
    family="qwen3",
    vocab_size=320,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=32,
    max_positions=4096,
    tied_embeddings=True,
)


def requests() -> list[Any]:
    return [
        pytest.param(request, id=f"{path.stem}-{number}")
        for path in RECORDED
        for number, request in enumerate(json.loads(path.read_text()))
    ]


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def replay(proxy: Proxy, session: Session, recorded: dict[str, Any]) -> Any:
    """The answer, checked: the events of a stream, else the whole."""
    kept = ("x-stainless", "accept", "content-type", "user-agent", "anthropic")
    headers = {name: value for name, value in recorded["headers"].items() if name.startswith(kept)}
    response = await proxy.http_client.request(
        recorded["method"],
        proxy.origin + recorded["path"],
        json=recorded["body"],
        headers=headers | {"authorization": f"Bearer {session.api_key}"},
    )
    assert response.status_code == 200, response.text
    dialect = recorded["path"].rpartition("/")[2]
    if not recorded["body"].get("stream"):
        return TypeAdapter(WHOLE[dialect]).validate_python(response.json())
    assert response.headers["content-type"].startswith("text/event-stream")
    check = TypeAdapter(STREAMED[dialect])
    return [check.validate_python(event) for event in events_of(response.text)]


@pytest.mark.parametrize("answer", ["It is 5.", CALL], ids=["text", "call"])
@pytest.mark.parametrize("recorded", requests())
async def test_recorded_request_is_answered(start_proxy, engine, recorded, answer):
    proxy = await start_proxy(max_positions=4096)
    session = proxy.open_session()
    engine.answer = answer
    assert await replay(proxy, session, recorded)
    assert len(session.tree.completions) == 1


async def test_recorded_requests_are_answered_by_a_model_that_knows_nothing(tokenizer):
    decoder = Decoder(UNTRAINED)
    initialise(decoder, torch.Generator().manual_seed(1))
    engine = EmbeddedEngine(DecoderRunner(decoder), tokenizer)
    proxy = Proxy(
        engine, tokenizer, gconfig=GenerationHyperparameters(max_new_tokens=32), max_positions=UNTRAINED.max_positions
    )
    await proxy.start()
    everything = [request.values[0] for request in requests()]
    sessions = [proxy.open_session() for _ in everything]
    async with asyncio.timeout(100):
        await asyncio.gather(*(replay(proxy, *call) for call in zip(sessions, everything, strict=True)))
    assert [len(session.tree.completions) for session in sessions] == [1] * len(everything)
    assert (await engine.health()).running == 0
    await proxy.aclose()
    await engine.aclose()
