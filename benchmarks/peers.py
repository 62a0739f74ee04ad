"""The peers that benchmarks compare with: each has an environment under the user's cache, installed on first use."""

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from areal.utils.threads import ALONE


def cache_directory() -> Path:
    """Where benchmarks keep environments and models between runs."""
    base = os.environ.get("AREAL_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "areal"
    )
    return Path(base)


def peer_environment(name: str, requirements: list[str], without: Sequence[str] = ()) -> Path:
    """The bin directory of a virtual environment with `requirements` but `without` those packages."""
    place = cache_directory() / "peers" / name
    stamp = place / "installed.txt"
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {name}: {' '.join(requirements)}", file=sys.stderr)
        venv.create(place, clear=True, with_pip=True)
        pip = place / "bin" / "pip"
        subprocess.run([pip, "install", "-qq", *requirements], check=True, stdout=sys.stderr)
        if without:
            subprocess.run([pip, "uninstall", "-qq", "-y", *without], check=True, stdout=sys.stderr)
        stamp.write_text(wanted)
    return place / "bin"


def outside_variables() -> dict[str, str]:
    """The environment without this package's own thread settings, so that peers run as they would by themselves."""
    return {name: value for name, value in os.environ.items() if ALONE.get(name) != value}
