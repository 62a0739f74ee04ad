"""Every file, module and link that the documentation names exists.

docs/log.md and CHANGELOG.md are history and may name what is gone. Words in capitals (`areal/workflow/NAME.py`) are
placeholders, and `my_` begins names of the reader's own.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HISTORY = {"docs/log.md", "CHANGELOG.md"}
ALL_PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md", ".claude/skills/*/SKILL.md")
    for path in sorted(ROOT.glob(pattern))
]
PAGES = [page for page in ALL_PAGES if page not in HISTORY]
PACKAGES = sorted(path.name for path in (ROOT / "areal").iterdir() if path.is_dir() and path.name != "__pycache__")

PATH = re.compile(r"(?<![\w./-])(?:areal|realhf|docs|tests|examples|benchmarks|deploy)/[\w./*-]*[\w/*]")
SHORT_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})/[\w./-]*\w\.py\b")
DOTTED = re.compile(r"(?<![\w./-])(?:areal|realhf|benchmarks)(?:\.\w+)+")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
PLACEHOLDER = re.compile(r"[A-Z]{3,}|NAME\w*|my")


@pytest.mark.parametrize("page", PAGES)
def test_paths_on_the_page_exist(page: str) -> None:
    text = _text(page)
    named = {*PATH.findall(text), *(f"areal/{path}" for path in SHORT_PATH.findall(text))}
    assert [path for path in sorted(named) if not _is_placeholder(path) and not any(ROOT.glob(path))] == []


@pytest.mark.parametrize("page", PAGES)
def test_modules_and_names_on_the_page_exist(page: str) -> None:
    named = sorted({name for name in DOTTED.findall(_text(page)) if not _is_placeholder(name)})
    assert [name for name in named if not _is_defined(name)] == []


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_on_the_page_lead_somewhere(page: str) -> None:
    broken = []
    for target, anchor in LINK.findall(_text(page)):
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_site_has_a_place_for_every_page() -> None:
    named = re.findall(r"(?<=: )\S+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(page.removeprefix("docs/") for page in ALL_PAGES if page.startswith("docs/"))


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if page.startswith("docs/")])
def test_pages_of_the_site_link_to_nothing_outside_of_it(page: str) -> None:
    targets = [(ROOT / page).parent / target for target, _ in LINK.findall(_text(page)) if target]
    assert [str(target) for target in targets if not target.resolve().is_relative_to(ROOT / "docs")] == []


@pytest.mark.parametrize(
    ("name", "defined"),
    [
        ("areal.proxy", True),
        ("areal.proxy.app", True),
        ("areal.proxy.app.App", True),
        ("areal.workflow.RLVRWorkflow", True),
        ("areal.proxy.gone", False),
        ("areal.proxy.app.Gone", False),
        ("areal.gone.app", False),
    ],
)
def test_the_check_tells_names_that_exist_from_others(name: str, defined: bool) -> None:
    assert _is_defined(name) is defined


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _is_placeholder(name: str) -> bool:
    words = re.split(r"[./_-]", name.removesuffix("README.md").removesuffix("SKILL.md"))
    return any(PLACEHOLDER.fullmatch(word) for word in words)


def _is_defined(dotted: str) -> bool:
    """Whether a module of that name exists, or a module up to some dot defines the name after it."""
    here, parts = ROOT, dotted.split(".")
    for number, part in enumerate(parts):
        if (here / part).is_dir():
            here = here / part
        elif (here / f"{part}.py").is_file():
            rest = parts[number + 1 :]
            return not rest or rest[0] in _names(here / f"{part}.py")
        else:
            return part in _names(here / "__init__.py")
    return True


def _names(module: Path) -> set[str]:
    """What a module defines or imports at its top level, blocks such as `if TYPE_CHECKING` included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, punctuation dropped, spaces to hyphens."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
