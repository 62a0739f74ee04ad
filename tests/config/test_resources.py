from typing import Any

import pytest

from areal.config.errors import ConfigError
from areal.config.rollout import RolloutConfig
from areal.config.training import ActorConfig, SchedulerConfig


def test_nothing_is_set_aside_unless_it_is_stated() -> None:
    for config in (RolloutConfig(), ActorConfig()):
        assert (config.gpus, config.cpus, config.memory_gib) == (None, 0, 0.0)


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"gpus": -1}, "gpus must be >= 0, got -1; use null for any"),
        ({"cpus": -2}, "cpus must be >= 0, got -2; use 0 to state nothing"),
        ({"memory_gib": -0.5}, "memory_gib must be >= 0, got -0.5; use 0 to state nothing"),
    ],
)
def test_less_than_nothing_is_refused(setting: dict[str, float], rule: str) -> None:
    for role in (RolloutConfig, ActorConfig):
        with pytest.raises(ConfigError, match=rule):
            role(**setting)


@pytest.mark.parametrize("role", [RolloutConfig, ActorConfig])
@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"gpus": 1, "device": "cuda:1"}, r"counts from 0, got cuda:1 with gpus=1; use cuda for the first of them"),
        ({"gpus": 2, "device": "cuda:2"}, r"got cuda:2 with gpus=2; .* or leave gpus out"),
        ({"gpus": 0, "device": "cuda"}, r"got cuda with gpus=0; use cpu, or gpus=1"),
        ({"gpus": 0, "device": "cuda:3"}, r"got cuda:3 with gpus=0"),
    ],
)
def test_a_device_that_is_not_among_the_gpus_set_aside_is_refused(
    role: Any, setting: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        role(**setting)


@pytest.mark.parametrize("role", [RolloutConfig, ActorConfig])
@pytest.mark.parametrize(
    ("gpus", "device"),
    [(1, "cuda"), (1, "cuda:0"), (2, "cuda:1"), (None, "cuda:5"), (0, "cpu"), (0, "auto"), (1, "auto")],
)
def test_a_device_that_can_be_among_them_is_taken(role: Any, gpus: int | None, device: str) -> None:
    assert role(gpus=gpus, device=device).device == device


def test_several_engines_are_not_put_on_one_gpu_by_name() -> None:
    with pytest.raises(ConfigError, match=r"a GPU each, got device=cuda:1 for the 2 of backend=embedded:d2; use cuda"):
        RolloutConfig(backend="embedded:d2", device="cuda:1")
    RolloutConfig(backend="embedded:d2", device="cuda:0", gpus=1)
    RolloutConfig(backend="embedded:d2", device="cuda")
    RolloutConfig(backend="embedded:d2", device="cpu")


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::"])
def test_driver_listens_at_one_address_never_at_all(address: str) -> None:
    with pytest.raises(ConfigError, match="address must be one of this machine's own, got"):
        SchedulerConfig(address=address)
