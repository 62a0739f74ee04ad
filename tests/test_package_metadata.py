"""What a release says of itself: the addresses that its builder gives, and no others."""

import os
import shutil
import subprocess
import sys
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools.build_meta import prepare_metadata_for_build_wheel as write; write('out')"
NEEDED = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "areal/__init__.py",
    "areal/engine/native/compile.py",
)
OURS = ("AREAL_PROJECT_URL", "GITHUB_SERVER_URL", "GITHUB_REPOSITORY")


def addresses(tree: Path, **environ: str) -> list[str]:
    for name in NEEDED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "out").mkdir()
    others = {name: value for name, value in os.environ.items() if name not in OURS}
    command = [sys.executable, "-c", BUILD]
    subprocess.run(command, cwd=tree, env=others | environ, check=True, capture_output=True, timeout=60)
    (metadata,) = (tree / "out").glob("*.dist-info/METADATA")
    return message_from_string(metadata.read_text(encoding="utf-8")).get_all("Project-URL", [])


@pytest.mark.slow
def test_a_release_names_the_address_that_its_builder_gives(tmp_path: Path) -> None:
    assert addresses(tmp_path, AREAL_PROJECT_URL="https://example.org/areal/") == [
        "Source, https://example.org/areal",
        "Issues, https://example.org/areal/issues",
        "Documentation, https://example.org/areal/blob/main/docs/index.md",
        "Changelog, https://example.org/areal/blob/main/CHANGELOG.md",
    ]


@pytest.mark.slow
def test_a_workflow_on_github_names_its_own_repository(tmp_path: Path) -> None:
    here = {"GITHUB_SERVER_URL": "https://github.example", "GITHUB_REPOSITORY": "someone/areal"}
    assert addresses(tmp_path, **here)[0] == "Source, https://github.example/someone/areal"


@pytest.mark.slow
def test_a_build_that_knows_no_address_invents_none(tmp_path: Path) -> None:
    assert addresses(tmp_path) == []
