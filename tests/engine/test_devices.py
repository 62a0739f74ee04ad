"""The devices that settings name, and copies between host and device."""

from typing import Any

import pytest
import torch

from areal.config.errors import ConfigError
from areal.config.rollout import RolloutConfig
from areal.config.training import ActorConfig
from areal.engine.model.device import CPU, find_device, to_device, to_host


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:11", "mps"])
def test_a_config_takes_the_names_of_devices(name: str) -> None:
    assert ActorConfig(device=name).device == RolloutConfig(device=name).device == name


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cuda:0\n", "cuda:٣", None])
@pytest.mark.parametrize("section", [ActorConfig, RolloutConfig])
def test_a_config_refuses_other_names(section: Any, name: Any) -> None:
    with pytest.raises(ConfigError, match=r"device must be auto, cpu, cuda, cuda:N or mps, got .*; use auto"):
        section(device=name)


def test_auto_is_the_fastest_device_that_is_there() -> None:
    wanted = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert find_device("auto", "actor.device").type == wanted


def test_a_device_beyond_the_last_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"rollout.device must name a device of this machine, got cuda:99"):
        find_device("cuda:99", "rollout.device")


def test_copies_cost_nothing_on_the_cpu() -> None:
    tensor = torch.zeros(3)
    assert to_device(tensor, CPU) is tensor
    assert to_host(tensor)[0] is tensor
