"""Where models that this package makes are kept, and how one is made exactly once."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

Report = Callable[[str], None]
"""Told how far the making is."""


def cache_directory() -> Path:
    base = os.environ.get("AREAL_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "areal"
    )
    return Path(base)


def cached(name: str, make: Callable[[Path, Report], None], report: Report) -> Path:
    """The directory of the model of that name, made now if it is not there. Safe when several processes ask at once."""
    target = cache_directory() / name
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix="making-", dir=target.parent))
        try:
            make(making, report)
            os.rename(making, target)
        except OSError:
            if not (target / "config.json").exists():
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return target
