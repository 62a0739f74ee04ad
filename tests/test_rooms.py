"""The layers of docs/architecture.md: imports only go down, and packages of one layer never import each other."""

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = [
    ["cli"],
    ["viewer"],
    ["trainer", "simulation"],
    ["rollout"],
    ["workflow", "proxy", "engine"],
    ["trajectory", "store", "algorithms", "reward", "dataset"],
    ["infra"],
    ["api"],
    ["config"],
    ["utils"],
]
"""From the top down. Packages in one list are neighbours."""

HEIGHT = {package: len(LAYERS) - depth for depth, packages in enumerate(LAYERS) for package in packages}
TOP_MODULE = "areal/__init__.py"
"""It only re-exports what users import, so it may import from every layer."""
IMPORTABLE_FROM_TOP = {"__version__"}
"""Names of the top module that depend on no layer."""

TORCH_FREE_PACKAGES = {
    "cli",
    "viewer",
    "simulation",
    "rollout",
    "proxy",
    "trajectory",
    "store",
    "infra",
    "api",
    "config",
    "utils",
}
MAY_USE_TORCH = {"areal/utils/data.py"}
"""Tensor helpers are this file's purpose; no torch-free package imports it at module level."""


@dataclass(frozen=True)
class Import:
    line: int
    name: str
    """Dotted, with the imported name at the end of a `from` import."""


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Every import in a file, lazy and TYPE_CHECKING ones included, and `import_module("…")` with a plain name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, module, is_package)
            yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from (Import(node.lineno, name) for name in _constant_texts(node.args[:1]))


def _constant_texts(arguments: list[ast.expr]) -> list[str]:
    return [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def _base_of(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, node.module] if node.module else parts)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def violations(root: Path) -> list[str]:
    """Every import at `root` that breaks the rule, one line each, as `file:line sentence`."""
    found = []
    for path in sorted([*root.glob("areal/**/*.py"), *root.glob("realhf/**/*.py")]):
        where = path.relative_to(root).as_posix()
        if where == TOP_MODULE:
            continue
        found += _violations_in(path, where)
    return found


def _violations_in(path: Path, where: str) -> list[str]:
    top, package, *_ = (*where.split("/"), "")
    if top == "areal" and package not in HEIGHT:
        return [f"{where}:1 {package} is not in LAYERS; draw a new package in docs/architecture.md"]
    module = where.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = _parsed(path)
    complaints = []
    for found in imports_of(tree, module, where.endswith("/__init__.py")):
        complaint = _complaint(top, package, found.name)
        if complaint:
            complaints.append(f"{where}:{found.line} {complaint}")
    return complaints


def _complaint(top: str, package: str, name: str) -> str | None:
    target, target_package, *_ = (*name.split("."), "")
    if target not in ("areal", "realhf") or top == "realhf":
        return None
    if target == "realhf":
        return f"{package} imports {name}: realhf imports areal, never the reverse"
    if target_package in IMPORTABLE_FROM_TOP or target_package == package:
        return None
    if target_package not in HEIGHT:
        return f"{package} imports {name or target}: import from the package that defines it"
    if HEIGHT[target_package] > HEIGHT[package]:
        return f"{package} imports {name}: {target_package} is above it"
    if HEIGHT[target_package] == HEIGHT[package]:
        return f"{package} imports {name}: {target_package} is a neighbour"
    return None


def eager_torch_imports(root: Path) -> list[str]:
    """Files of torch-free packages that load torch when they are imported; a TYPE_CHECKING block loads nothing."""
    found = []
    for path in sorted(root.glob("areal/*/**/*.py")):
        where = path.relative_to(root).as_posix()
        if where.split("/")[1] in TORCH_FREE_PACKAGES and where not in MAY_USE_TORCH:
            found += [f"{where}:{node.lineno}" for node in _eager(_parsed(path)) if _loads_torch(node)]
    return found


def _eager(node: ast.AST) -> Iterator[ast.AST]:
    """The statements below `node` that run on import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _eager(ast.Module(child.orelse, []))
            continue
        yield child
        yield from _eager(child)


def _loads_torch(node: ast.AST) -> bool:
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [node.module or ""]
    return any(name.split(".")[0] == "torch" or name == "areal.utils.data" for name in names)


def test_imports_only_go_down() -> None:
    assert violations(ROOT) == []


def test_torch_free_packages_do_not_load_torch_themselves() -> None:
    assert eager_torch_imports(ROOT) == []


def test_class_names_are_unique() -> None:
    """The example agents in workflow/ are named alike on purpose."""
    homes: dict[str, list[str]] = {}
    for path in sorted([*ROOT.glob("areal/**/*.py"), *ROOT.glob("realhf/**/*.py")]):
        where = path.relative_to(ROOT).as_posix()
        if not where.startswith("areal/workflow/"):
            for node in ast.walk(_parsed(path)):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(where)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


TORCH_FREE_MODULES = [
    "areal",
    "areal.config.loader",
    "areal.utils",
    "areal.api.cli_args",
    "areal.api.workflow_api",
    "areal.api.reward_api",
    "areal.infra",
    "areal.trajectory",
    "areal.engine.sizing",
    "areal.proxy",
    "areal.rollout",
    "areal.viewer.app",
    "areal.viewer.bundle",
    "areal.cli.main",
]


@pytest.mark.slow
def test_modules_that_promise_it_load_no_torch() -> None:
    modules = [name for name in TORCH_FREE_MODULES if (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]
    modules += [name for name in TORCH_FREE_MODULES if (ROOT / name.replace(".", "/") / "__init__.py").exists()]
    assert "areal" in modules
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, f'importing {name} loads torch'\n"
    done = subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def write_package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("where", "text", "complaint"),
    [
        (
            "areal/proxy/app.py",
            "import areal.trainer.ppo",
            "1 proxy imports areal.trainer.ppo: trainer is above it",
        ),
        ("areal/proxy/app.py", "from areal import rollout", "1 proxy imports areal.rollout: rollout is above it"),
        ("areal/proxy/app.py", "\nfrom areal.engine import x", "2 proxy imports areal.engine.x: engine is a neighbour"),
        ("areal/proxy/a/b.py", "from ...engine import x", "1 proxy imports areal.engine.x: engine is a neighbour"),
        ("areal/proxy/__init__.py", "from ..cli import x", "1 proxy imports areal.cli.x: cli is above it"),
        (
            "areal/api/x.py",
            "def f():\n    from areal.infra import y",
            "2 api imports areal.infra.y: infra is above it",
        ),
        (
            "areal/api/x.py",
            "if TYPE_CHECKING:\n    from areal.engine.model import M",
            "2 api imports areal.engine.model.M: engine is above it",
        ),
        (
            "areal/utils/x.py",
            "importlib.import_module('areal.api.errors')",
            "1 utils imports areal.api.errors: api is above it",
        ),
        (
            "areal/cli/x.py",
            "from areal import PPOTrainer",
            "1 cli imports areal.PPOTrainer: import from the package that defines it",
        ),
        ("areal/cli/x.py", "import areal", "1 cli imports areal: import from the package that defines it"),
        (
            "areal/trainer/x.py",
            "import realhf.api",
            "1 trainer imports realhf.api: realhf imports areal, never the reverse",
        ),
        (
            "areal/helpers/x.py",
            "",
            "1 helpers is not in LAYERS; draw a new package in docs/architecture.md",
        ),
        (
            "areal/tools.py",
            "",
            "1 tools.py is not in LAYERS; draw a new package in docs/architecture.md",
        ),
    ],
)
def test_the_check_sees_each_way_to_break_the_rule(tmp_path: Path, where: str, text: str, complaint: str) -> None:
    assert violations(write_package(tmp_path, {where: text})) == [f"{where}:{complaint}"]


def test_the_check_allows_imports_downwards_and_everything_in_the_top_module(tmp_path: Path) -> None:
    root = write_package(
        tmp_path,
        {
            "areal/__init__.py": "from areal.trainer.ppo import PPOTrainer",
            "areal/trainer/ppo.py": "from areal.engine import x\nfrom areal.rollout import y\nfrom . import metrics",
            "areal/proxy/dialects/chat.py": "from ..app import x\nfrom areal.proxy import y\nimport os, torchvision",
            "areal/cli/main.py": "from areal import __version__",
            "realhf/api.py": "from areal import PPOTrainer\nimport realhf.impl",
        },
    )
    assert violations(root) == []


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("import torch", True),
        ("from torch.nn import Linear", True),
        ("class A:\n    import torch.nn", True),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", True),
        ("from areal.utils.data import concat_padded_tensors", True),
        ("def f():\n    import torch", False),
        ("if TYPE_CHECKING:\n    import torch", False),
        ("import torchvision_free_name", False),
    ],
)
def test_the_torch_check_tells_eager_from_lazy(tmp_path: Path, text: str, caught: bool) -> None:
    root = write_package(tmp_path, {"areal/proxy/app.py": text, "areal/engine/model.py": "import torch"})
    assert bool(eager_torch_imports(root)) is caught


def test_the_picture_in_the_docs_is_this_one() -> None:
    picture = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    drawn = []
    for line in picture.splitlines():
        if line.startswith("  ") and line[2] != " ":
            packages = line.strip().partition("  ")[0]
            drawn.append([package.strip().rstrip("/") for package in packages.split("|")])
    assert drawn == LAYERS


def test_modules_that_pytest_imports_together_have_names_of_their_own() -> None:
    """The directories of tests are no packages, so pytest knows a module by its file name alone. The second of one name
    is an error, which a run reports when everything else has passed."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    apart = set(settings["norecursedirs"])
    by_name: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        where = path.relative_to(ROOT / "tests")
        if where.parts[0] not in apart and path.name not in ("conftest.py", "__init__.py"):
            by_name.setdefault(path.name, []).append(where.as_posix())
    assert [places for places in by_name.values() if len(places) > 1] == []
