"""Where this package keeps what it makes once and uses again: models, compiled kernels."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$AREAL_CACHE`, else `areal` in the user's cache directory. It need not exist."""
    base = os.environ.get("AREAL_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "areal"
    )
    return Path(base)
