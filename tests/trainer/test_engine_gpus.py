"""Several engines of one run have a GPU each, where there are GPUs."""

import pytest
import torch

from areal.api.errors import PlacementRefused
from areal.config.rollout import RolloutConfig
from areal.infra.scheduler.local import FreeResources, LocalLauncher
from areal.trainer.engines import engine_asks, on_this_machine


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose torch sees two GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("backend", "device", "stated", "each"),
    [
        ("embedded", "cuda", None, None),
        ("embedded", "auto", None, None),
        ("embedded:d2", "cuda", None, 1),
        ("embedded:d2", "cpu", None, None),
        ("embedded:d2", "auto", None, None),
        ("embedded:d2", "auto", 0, 0),
        ("embedded:d2", "cuda", 1, 1),
        ("vllm:d2t4", "auto", None, 4),
        ("vllm:d2", "cuda", None, 1),
    ],
)
def test_what_engines_ask_for(backend: str, device: str, stated: int | None, each: int | None) -> None:
    asks = engine_asks(RolloutConfig(backend=backend, device=device, gpus=stated))
    assert {ask.gpus for ask in asks} == {each}


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("backend", ["embedded:d2", "vllm:d2", "sglang:d2"])
async def test_several_engines_get_a_gpu_each_of_a_machine_that_has_some(backend: str) -> None:
    asks = engine_asks(on_this_machine(RolloutConfig(backend=backend)))
    machine = FreeResources(8, 1000, ["0", "1"])
    assert [machine.take(ask) for ask in asks] == [["0"], ["1"]]
    with pytest.raises(PlacementRefused, match="engine 1 must fit this machine, but needs 1 GPUs, 0 are free; ask for"):
        await LocalLauncher(FreeResources(8, 1000, ["0"])).reserve(asks, 1.0)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "rollout",
    [
        RolloutConfig(),
        RolloutConfig(backend="embedded:d2", device="cpu"),
        RolloutConfig(addresses=["unix:/run/one", "unix:/run/two"]),
    ],
    ids=["one", "on the CPU", "running"],
)
def test_others_are_left_as_they_are(rollout: RolloutConfig) -> None:
    assert on_this_machine(rollout) is rollout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("backend", ["embedded:d2", "vllm:d2"])
def test_without_gpus_engines_share_the_processor(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rollout = RolloutConfig(backend=backend)
    assert on_this_machine(rollout) is rollout
    assert [ask.gpus for ask in engine_asks(rollout)] == [None, None]
