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


def addresses(tree: Path, **environ: str) -> list[str]:
    for name in NEEDED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "out").mkdir()
    others = {name: value for name, value in os.environ.items() if name != "AREAL_PROJECT_URL"}
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
def test_a_build_in_the_workflow_of_another_project_does_not_name_that_one(tmp_path: Path) -> None:
    theirs = {"GITHUB_SERVER_URL": "https://github.example", "GITHUB_REPOSITORY": "someone/else"}
    assert addresses(tmp_path, **theirs) == []
