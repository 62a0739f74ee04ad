"""What a transformers config says about a model, under whichever name it says it. Needs no weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal.api.errors import ModelError

PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
"""What configs call the tokens that stand for something else than text."""
POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
UNLIMITED = 1 << 17
"""Positions of a model that names no limit, as recurrent ones do."""


def read_config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"transformers cannot read the model in {str(directory)!r}: {first_line(error)}") from None


def positions_of(config: Any) -> int:
    text = config.get_text_config()
    return next((int(getattr(text, name)) for name in POSITIONS if getattr(text, name, None)), UNLIMITED)


def sees_images(config: Any) -> bool:
    return getattr(config, "vision_config", None) is not None


def placeholders_of(config: Any) -> set[int]:
    found = (getattr(config, name, None) for name in PLACEHOLDERS)
    return {token for token in found if isinstance(token, int) and token >= 0}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bars that transformers draws while it reads and writes."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
