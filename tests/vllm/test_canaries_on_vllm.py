"""A real vLLM server that lost weights without an error is found out; what it has cached does not hide it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from engine_kinds import answer, begin, soon
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer
from vllm_engines import VllmEngines

from areal.api.engine_api import InferenceEngine, WeightUpdate
from areal.api.errors import WrongWeights
from areal.engine.inference.http_engine import LOAD_SECONDS, label_of
from areal.engine.inference.vllm import VllmEngine
from areal.trainer.canary import TOLERANCES, Canaries

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def canaries() -> Canaries:
    return Canaries(byte_tokenizer(), TOLERANCES["float32"])


@pytest_asyncio.fixture(loop_scope="session")
async def direct(engines: VllmEngines) -> AsyncIterator[VllmEngine]:
    engine = await engines.open_directly()
    yield engine
    await engine.aclose()


def published(engines: VllmEngines, canaries: Canaries) -> WeightUpdate:
    return canaries.attached(engines.publish(), engines.trainer)


async def test_vllm_computes_what_the_trainer_does_also_while_it_is_busy(
    engines: VllmEngines, engine: InferenceEngine, canaries: Canaries
) -> None:
    tasks = await begin(engine, 4, max_new_tokens=60)
    for _ in range(3):
        await engine.update_weights(published(engines, canaries))
    for response in await soon(asyncio.gather(*tasks)):
        assert response.output_len == 60


async def test_what_vllm_has_cached_of_the_canary_is_computed_again(
    engines: VllmEngines, direct: VllmEngine, canaries: Canaries
) -> None:
    """Else a canary would be answered from before the change, or only its last tokens would be."""
    await direct.update_weights(update := published(engines, canaries))
    assert update.canary is not None
    tokens = list(update.canary.tokens)
    await answer(direct, tokens, max_new_tokens=20)  # its blocks are in the prefix cache now
    first, again = [await direct.score(tokens) for _ in range(2)]
    assert len(first) == len(tokens) - 1
    for found in (first, again):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(update.canary.logprobs), atol=1e-4, rtol=0)


FAULTS: dict[str, Callable[[int, str], bool]] = {
    "it loads nothing": lambda place, name: False,
    "it loads half of the file": lambda place, name: place % 2 == 0,
    "it drops the adapter of two layers": lambda place, name: not name.endswith(("q_proj.weight", "v_proj.weight")),
}
"""Which tensors of new weights reach the server."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_lost_weights_are_found_out_on_vllm(
    engines: VllmEngines,
    direct: VllmEngine,
    canaries: Canaries,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    await direct.update_weights(old := published(engines, canaries))
    new = published(engines, canaries)
    before, after = (load_file(f"{each.path}/model.safetensors") for each in (old, new))
    mixed = {name: (after if FAULTS[fault](place, name) else before)[name] for place, name in enumerate(sorted(after))}
    save_file(mixed, tmp_path / "model.safetensors", metadata={"format": "pt"})

    async def load(update: WeightUpdate) -> None:
        body = {"method": "load_published_weights", "kwargs": {"weights_path": str(tmp_path)}}
        await direct.server.post("/collective_rpc", body, LOAD_SECONDS)
        await direct.label_server(label_of(update))

    monkeypatch.setattr(direct, "load_weights", load)
    told = rf"vLLM must compute with the weights of version {new.version}.*expected -\d.*, got -\d"
    with pytest.raises(WrongWeights, match=told):
        await direct.update_weights(new)
    monkeypatch.undo()
    await direct.update_weights(published(engines, canaries))
