"""What vLLM tells of the tokens that top_p and top_k left, against a stand-in for its routes. With vLLM itself:
tests/vllm/test_masks_on_vllm.py."""

from pathlib import Path

import pytest
from drawn_rows import READER, row_of
from fake_vllm_server import FakeVllm, fake
from tiny_models import TINY, write_model

from areal.api.errors import ArealError
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference import vllm
from areal.engine.inference.http_server import HttpServer
from areal.engine.inference.remote import RemoteEngine, worker_handlers
from areal.engine.inference.vllm import TIED, VllmEngine
from areal.infra.rpc.connect import connect, serve
from areal.infra.rpc.wire import api_wire

__all__ = ["fake"]
pytestmark = pytest.mark.slow

SETS = [{"7": -0.9, "3": -0.5}, {"5": -0.1}, {"9": -3.0, "200": -0.2, "11": -1.7}]
TIES = {str(token): -3.0 for token in range(20, 60)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


async def asked(
    server: FakeVllm, url: str, model: Path, drawn: TokenChunk | None = None, **settings: float
) -> ModelResponse:
    engine = await VllmEngine.join(HttpServer("vLLM", url), model)
    begun = len(drawn.tokens) if drawn else 0
    g = GenerationHyperparameters(max_new_tokens=len(server.choices) + begun, **settings)  # type: ignore[arg-type]
    try:
        return await engine.agenerate(ModelRequest("r", [1, 2], g, drawn=drawn))
    finally:
        await engine.aclose()


async def test_the_tokens_that_could_be_drawn_are_recorded(fake: tuple[FakeVllm, str], model: Path) -> None:
    server, url = fake
    server.choices = SETS
    answer = await asked(server, url, model, top_k=3, top_p=0.9)
    assert answer.output_tokens == [7, 5, 9]
    assert answer.choices is not None
    assert [left.tolist() for left in answer.choices.sets()] == [[3, 7], [5], [9, 11, 200]]
    assert READER.read([row_of(answer)]) is not None
    (body,) = [each for each in server.bodies("/inference/v1/generate") if each.get("stream")]
    assert body["sampling_params"]["logprobs"] == 3 + TIED


async def test_top_p_alone_is_recorded_where_the_vocabulary_is_small(fake: tuple[FakeVllm, str], model: Path) -> None:
    server, url = fake
    server.choices = SETS
    answer = await asked(server, url, model, top_p=0.9)
    assert server.bodies("/inference/v1/generate")[-1]["sampling_params"]["logprobs"] == TINY.vocab_size
    assert answer.choices is not None
    assert answer.choices.sizes is not None
    assert answer.choices.sizes.tolist() == [2, 1, 3]


async def test_nothing_is_asked_for_where_nothing_is_left_out(fake: tuple[FakeVllm, str], model: Path) -> None:
    server, url = fake
    for settings in ({}, {"top_k": 10**6}, {"temperature": 0.0, "top_k": 5}):
        answer = await asked(server, url, model, **settings)
        assert answer.choices is None or answer.choices.greedy
        assert server.bodies("/inference/v1/generate")[-1]["sampling_params"]["logprobs"] == 0


async def test_what_is_too_much_to_tell_cannot_be_trained(
    fake: tuple[FakeVllm, str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = fake
    monkeypatch.setattr(vllm, "VLLM_CHOICES", 50)
    for settings in ({"top_k": 51}, {"top_p": 0.9}):
        answer = await asked(server, url, model, **settings)
        assert answer.choices is not None
        assert answer.choices.unreported == "vLLM"
        assert server.bodies("/inference/v1/generate")[-1]["sampling_params"]["logprobs"] == 0
        with pytest.raises(ArealError, match=r"vLLM does not report .* on vLLM with any top_p a top_k of 1 to"):
            READER.read([row_of(answer)])


async def test_a_set_of_which_more_may_be_missing_is_not_taken_for_whole(
    fake: tuple[FakeVllm, str], model: Path
) -> None:
    """Equally likely tokens at the end of top_k: vLLM draws from all of them."""
    server, url = fake
    server.choices = [SETS[0], TIES, SETS[1]]
    answer = await asked(server, url, model, top_k=3)
    assert answer.output_len == 3
    assert answer.choices is not None
    assert answer.choices.unreported == "vLLM"


async def test_an_answer_that_began_elsewhere_with_an_unknown_set_stays_so(
    fake: tuple[FakeVllm, str], model: Path
) -> None:
    server, url = fake
    engine = await VllmEngine.join(HttpServer("vLLM", url), model)
    server.choices = [SETS[0], TIES]
    request = ModelRequest("r", [1, 2], GenerationHyperparameters(max_new_tokens=2, top_k=3))
    begun = TokenChunk()
    async for chunk in engine.astream(request):
        begun.extend(chunk)
    await engine.aclose()
    assert [len(left) for left in begun.sets] == [2, 0]
    server.choices = SETS
    answer = await asked(server, url, model, begun, top_k=3)
    assert answer.output_tokens == [7, 20, 7, 5, 9]
    assert answer.choices is not None
    assert answer.choices.unreported == "vLLM"


async def test_a_worker_gets_the_sets_from_the_process_that_holds_vllm(
    fake: tuple[FakeVllm, str], model: Path, tmp_path: Path
) -> None:
    server, url = fake
    server.choices = SETS
    engine = await VllmEngine.join(HttpServer("vLLM", url), model)
    listener = await serve(
        f"unix:{tmp_path}/engine",
        lambda channel: channel.handlers.update(worker_handlers(engine, channel)),
        wire=api_wire(),
    )
    worker = RemoteEngine(await connect(listener.address, wire=api_wire(), peer="the engine"))
    answer = await worker.agenerate(ModelRequest("r", [1, 2], GenerationHyperparameters(max_new_tokens=3, top_k=3)))
    assert answer.output_tokens == [7, 5, 9]
    assert answer.choices is not None
    assert [left.tolist() for left in answer.choices.sets()] == [[3, 7], [5], [9, 11, 200]]
    await worker.aclose()
    await listener.close()
    await engine.aclose()
