"""How to install what is missing: the remedy of every error that names a package.

The distribution is called areal-agents. `areal` on the package index is another project with a package of the same
name: installed beside this one, it overwrites files of it.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DISTRIBUTION = "areal-agents"
OTHER = "areal"
"""The other project's."""
TESTED_TORCH = "torch==2.13.0"
"""Any build from 2.8 on may be there already; this is the one that everything here was run with."""
_ROOT = Path(__file__).resolve().parents[2]


def install_hint(*extras: str) -> str:
    """The command that adds extras to this installation, whether it is a checkout or came from the package index."""
    named = ",".join(extras)
    if not (_ROOT / "pyproject.toml").is_file():
        return f"pip install '{DISTRIBUTION}[{named}]'"
    return f"pip install -e '{'.' if _is_here(_ROOT) else _ROOT}[{named}]'"


def missing(what: str, error: ImportError, *extras: str) -> str:
    """What an error says about a package that could not be imported."""
    return f"{what} ({error}); {install_hint(*extras)}"


def other_project() -> str | None:
    """The version of the other project that is installed in this environment; None = it is not."""
    try:
        found = distribution(OTHER).metadata
    except PackageNotFoundError:
        return None
    try:  # this one had that name in checkouts before it had its own
        own = distribution(DISTRIBUTION).metadata["Summary"]
    except PackageNotFoundError:
        return None
    return None if found["Summary"] == own else found["Version"]


def _is_here(directory: Path) -> bool:
    try:
        return Path.cwd() == directory
    except FileNotFoundError:  # the working directory was deleted
        return False
