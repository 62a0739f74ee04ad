"""Fixtures for tests that compute."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_kinds import engine, engines

from areal.api.errors import KernelUnavailable
from areal.engine.inference import decoder_runner
from areal.engine.inference.kernels import StepKernel, choose_kernel
from areal.engine.native.library import load

__all__ = ["engine", "engines"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by more threads, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes the steps of runners that do not say; each test that uses it runs with both."""
    if request.param == "native":
        try:
            load()
        except KernelUnavailable as reason:
            pytest.skip(str(reason))

    def choose(setting: Any, *args: Any) -> StepKernel:
        return choose_kernel(request.param if setting == "auto" else setting, *args)

    monkeypatch.setattr(decoder_runner, "choose_kernel", choose)
    return str(request.param)
