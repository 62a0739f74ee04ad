"""Which GPU a rank takes: there is none here, so torch is told that there are."""

import pytest
import torch

from areal.engine.sharded.rank import own_device


@pytest.fixture
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("_four_gpus")
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_ranks_of_one_host_take_a_gpu_each(name: str) -> None:
    assert [own_device(name, before).index for before in range(4)] == [0, 1, 2, 3]


@pytest.mark.usefixtures("_four_gpus")
def test_a_gpu_that_is_named_is_taken() -> None:
    assert own_device("cuda:2", 1).index == 2


def test_a_rank_that_sees_one_gpu_takes_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert own_device("auto", 3).index == 0
