"""What errors tell people to install is right, for a checkout and for an installed package."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from areal.utils import installing
from areal.utils.installing import install_hint, missing, other_project

ROOT = Path(__file__).parents[2]


def test_hint_of_a_checkout_installs_that_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_hint("ray", "fsdp") == "pip install -e '.[ray,fsdp]'"
    monkeypatch.chdir(tmp_path)
    assert install_hint("ray") == f"pip install -e '{ROOT}[ray]'"


def test_hint_of_an_installed_package_names_the_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installing, "_ROOT", tmp_path)
    assert install_hint("ray") == "pip install 'areal-agents[ray]'"
    assert missing("this needs Ray", ImportError("no ray"), "ray") == "this needs Ray (no ray); " + install_hint("ray")


def test_every_extra_that_is_named_exists() -> None:
    import re
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text() for path in (ROOT / "areal").rglob("*.py")]
    hints = [found for text in sources for found in re.findall(r"install_hint\(([^)]+)\)", text)]
    named = {name for hint in hints for name in re.findall(r"['\"]([\w-]+)['\"]", hint)}
    pages = [
        path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    ]
    named |= {
        name for text in pages for found in re.findall(r"areal-agents\[([\w,-]+)\]", text) for name in found.split(",")
    }
    assert named
    assert named <= known.keys()


class _Found:
    def __init__(self, summary: str) -> None:
        self.metadata = {"Summary": summary, "Version": "9.9"}


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"areal-agents": "ours"}, None),
        ({"areal-agents": "ours", "areal": "ours"}, None),
        ({"areal-agents": "ours", "areal": "theirs"}, "9.9"),
    ],
)
def test_the_other_project_of_the_same_name_is_noticed(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, str], told: str | None
) -> None:
    def distribution(name: str) -> Any:
        if name not in there:
            raise PackageNotFoundError(name)
        return _Found(there[name])

    monkeypatch.setattr(installing, "distribution", distribution)
    assert other_project() == told
