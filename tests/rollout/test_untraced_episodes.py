"""Without `rollout.tracing` nothing of OpenTelemetry is there; with it, what is missing is said at once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sdk_call import chat

from areal.api.errors import ConfigError
from areal.api.messages import Episode
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config
from areal.infra import tracing
from areal.proxy import delivery
from areal.trainer.trainers import PPOTrainer

ROOT = Path(__file__).parents[2]


async def test_call_of_an_episode_that_is_not_traced_is_left_as_it_is(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("nothing wraps the events of such a call")

    monkeypatch.setattr(delivery, "traced", never)

    async def agent(data: Any, **kwargs: Any) -> float:
        assert tracing.current() is None
        await chat(kwargs, data["messages"])
        return 1.0

    assert isinstance(await play(agent), Episode)


@pytest.mark.slow
def test_rollout_and_proxy_load_nothing_of_opentelemetry() -> None:
    code = "import sys, areal.rollout.worker, areal.proxy\n"
    code += "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["not installed", "only its interface"])
def test_missing_library_is_named_before_anything_starts(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        if how == "not installed":
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(tracing, "find_spec", find_spec)
    words = [
        "actor.path=builtin:tiny-math",
        "train_dataset.path=builtin:sort-digits",
        "rollout.tracing=true",
        "quiet=true",
    ]
    config, _ = load_expr_config(words, GRPOConfig)
    with pytest.raises(ConfigError, match=r"rollout.tracing=true needs OpenTelemetry's SDK .*; pip install .*\[otel\]"):
        PPOTrainer(config)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, {"service.name": "areal"}),
        ({"OTEL_SERVICE_NAME": "mine"}, {}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,team=a"}, {}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=a"}, {"service.name": "areal"}),
    ],
)
def test_spans_are_of_areal_unless_the_user_named_the_service(environ: dict[str, str], named: dict[str, str]) -> None:
    assert tracing._service(environ) == named
