"""Where the model is that a config names, as far as that can be said without loading torch."""

from collections.abc import Callable
from pathlib import Path

from areal.api.errors import ModelError

Report = Callable[[str, float], None]
"""Gets lines on how far a built-in model is made, and the share that is done by estimate; it may pass 1."""

PREFIX = "builtin:"
BUILTIN_NAMES = ("tiny-math", "tiny-countdown", "tiny-vision")
"""Models that the package makes itself on first use."""
CHECKPOINTS = "checkpoints/step-*[0-9]"
"""In the directory of a run."""


def builtin_name(path: str) -> str | None:
    """The name of a built-in model; None = the path is another's."""
    if not path.startswith(PREFIX):
        return None
    name = path.removeprefix(PREFIX)
    if name not in BUILTIN_NAMES:
        raise ModelError(f"no built-in model {name!r}; use one of {', '.join(BUILTIN_NAMES)}")
    return name


def model_directory(path: str) -> Path | None:
    """The directory at `path`, of a run that of its newest model; None = there is none, but it may be a Hugging Face
    id."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return max(directory.glob(CHECKPOINTS), key=lambda each: (len(each.name), each.name), default=directory)
    if directory.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelError(f"no model directory at {path!r}; name one, a run's, a Hugging Face id, or builtin:tiny-math")
    return None


def check_model_path(path: str) -> None:
    """Refuse what cannot be a model."""
    if builtin_name(path) is None:
        model_directory(path)
