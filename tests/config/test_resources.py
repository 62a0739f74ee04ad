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


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::"])
def test_driver_listens_at_one_address_never_at_all(address: str) -> None:
    with pytest.raises(ConfigError, match="address must be one of this machine's own, got"):
        SchedulerConfig(address=address)
