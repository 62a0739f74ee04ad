"""Fixtures for tests that compute."""

from collections.abc import Iterator

import pytest
import torch
from engine_kinds import engine, engines

__all__ = ["engine", "engines"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by more threads, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
