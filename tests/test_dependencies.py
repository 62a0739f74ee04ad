"""Whatever the package imports is declared: what comes along with another package may be gone with its next release."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "huggingface_hub": "huggingface-hub",
    "math_verify": "math-verify",
    "opentelemetry": "opentelemetry-sdk",
    "reasoning_gym": "reasoning-gym",
    "yaml": "pyyaml",
}
"""Of modules that are called otherwise."""
OTHERS_OWN = {"vllm"}
"""Imported in that program's own environment only."""


def imported(path: Path) -> set[str]:
    """The packages that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[\[<>=]", each)[0].lower() for names in lists for each in names}
    own = {"areal", "realhf"}
    found = {name for room in own for path in (ROOT / room).rglob("*.py") for name in imported(path)}
    needed = {DISTRIBUTIONS.get(name, name).lower() for name in found - own - OTHERS_OWN}
    assert "torch" in needed
    assert needed <= declared, f"add {sorted(needed - declared)} to pyproject.toml"
