"""What several rooms' tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_math() -> Path:
    """The built-in model, from the user's cache as in a real run: the first session makes it (15–30 s)."""
    from areal.engine.models import find_model  # here, so that tests without a model need no torch

    return find_model("builtin:tiny-math")


@pytest.fixture(scope="session")
def vision_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and processor of a model that sees pictures, without the model."""
    from tiny_processor import save_processor

    directory = tmp_path_factory.mktemp("vision")
    save_processor(directory)
    return directory
