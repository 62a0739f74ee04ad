"""From what a config says to a model directory: `builtin:NAME`, a directory, or a Hugging Face id."""

from collections.abc import Callable
from pathlib import Path

from areal.api.errors import ModelError
from areal.engine.builtin.tiny_countdown import TINY_COUNTDOWN
from areal.engine.builtin.tiny_math import TINY_MATH
from areal.engine.builtin.tiny_vision import tiny_vision

BUILTIN: dict[str, Callable[[Callable[[str], None]], Path]] = {
    "tiny-math": TINY_MATH.cached,
    "tiny-countdown": TINY_COUNTDOWN.cached,
    "tiny-vision": tiny_vision,
}


def find_model(path: str, report: Callable[[str], None] = lambda text: None) -> Path:
    """The directory of a model; a built-in one is made on first use, and `report` is told how far that is."""
    if path.startswith("builtin:"):
        name = path.removeprefix("builtin:")
        if name not in BUILTIN:
            raise ModelError(f"no built-in model {name!r}; there are {', '.join(BUILTIN)}")
        return BUILTIN[name](report)
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelError(
            f"no model directory at {path!r}; set actor.path to one, to a Hugging Face id, or to builtin:tiny-math"
        )
    return _download(path)


def _download(model_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model_id, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"])
        )
    except (OSError, ValueError) as error:  # the hub's errors are of both kinds
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"no directory {model_id!r} here, and the model hub did not give it: {reason}") from None
