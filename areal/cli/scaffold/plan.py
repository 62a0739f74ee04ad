"""Where the files of a new workflow or agent go. Decides everything before a file is touched, and refuses bad names."""

import importlib.util
import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from areal.api.errors import ConfigError
from areal.cli.scaffold.package_init import with_name
from areal.cli.scaffold.templates import AGENT, AGENT_TEST, WORKFLOW, WORKFLOW_TEST

CHECKOUT = Path("areal/workflow")
"""Where workflows go in a checkout of this package."""
PROJECT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


@dataclass(frozen=True)
class Kind:
    suffix: str
    code: Template
    test: Template
    reward_fn: str = ""
    """What the constructor is given, by its import string."""


KINDS = {
    "workflow": Kind("Workflow", WORKFLOW, WORKFLOW_TEST, "areal.reward.exact_match_reward"),
    "agent": Kind("Agent", AGENT, AGENT_TEST),
}


@dataclass(frozen=True)
class Plan:
    files: dict[Path, str]
    """What each file is to hold."""
    commands: dict[str, str]
    """What to do with them: verb -> the line that does it."""

    def write(self) -> list[str]:
        """Write what differs; a line for each file, saying what happened to it."""
        return [f"{_write(path, text)}  {path}" for path, text in self.files.items()]


def make_plan(kind: str, name: str, into: str | None, *, force: bool) -> Plan:
    """Raises ConfigError for a bad name, a place that is none, or a file that would be overwritten."""
    what = KINDS[kind]
    _check_name(name)
    directory = _directory(into)
    root = _import_root(directory)
    package = ".".join(directory.resolve().relative_to(root.resolve()).parts)
    module = f"{package}.{name}" if package else name
    _check_shadow(module.partition(".")[0], root)
    class_name = _class_name(name, what.suffix)
    own = directory / f"{name}.py"
    test = _project_root(root) / "tests" / f"test_{name}_{kind}.py"
    for path in (own, test):
        if path.exists() and not force:
            raise ConfigError(f"areal new writes new files, but {path} exists; choose another name or add --force")
    inside = module.startswith("areal.")
    words = {
        "class_name": class_name,
        "module": module,
        # Import sorters keep a project's own modules apart from installed ones, and this package may be either.
        "blank_in_checkout": "\n" if inside else "",
        "blank_elsewhere": "" if inside else "\n",
    }
    files = {own: what.code.substitute(words)}
    if package:
        init = directory / "__init__.py"
        before = init.read_text(encoding="utf-8") if init.exists() else ""
        files[init] = with_name(before, module, class_name, str(init))
    files[test] = what.test.substitute(words)
    import_string = f"{module}.{class_name}"
    return Plan(files, _commands(import_string, test, what.reward_fn))


def _commands(workflow: str, test: Path, reward_fn: str) -> dict[str, str]:
    kwargs = f', workflow_kwargs={{"reward_fn": "{reward_fn}"}}' if reward_fn else ""
    return {
        "train it": f'trainer.train(workflow="{workflow}"{kwargs})',
        "test it": f"python -m pytest {test}",
        "check it": f"areal check {workflow}" + (f" reward_fn={reward_fn}" if reward_fn else ""),
    }


def _check_name(name: str) -> None:
    if keyword.iskeyword(name) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        near = re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower().strip("_")
        offer = f"; try {near}" if near != name and re.fullmatch(r"[a-z][a-z0-9_]*", near) else ""
        raise ConfigError(f"a name must be a module's, small letters, digits and _, not a keyword, got {name!r}{offer}")


def _check_shadow(top: str, root: Path) -> None:
    """Refuse a new module or package that would hide one which this or other programs import."""
    is_new = not (root / top).exists() and not (root / f"{top}.py").exists()
    if is_new and importlib.util.find_spec(top) is not None:
        raise ConfigError(f"{top!r} is a module of Python or an installed one, which a new one would hide; rename it")


def _class_name(name: str, suffix: str) -> str:
    """`my_search` and `my_search_agent` are both MySearchAgent."""
    camel = "".join(word.capitalize() for word in name.split("_"))
    return camel if camel.endswith(suffix) and camel != suffix else f"{camel}{suffix}"


def _directory(into: str | None) -> Path:
    if into is None:
        return CHECKOUT if (CHECKOUT / "__init__.py").is_file() else Path()
    directory = Path(into)
    bad = [part for part in directory.parts if part not in ("/", ".", "..") and not part.isidentifier()]
    if bad and not directory.is_dir():
        raise ConfigError(f"--into must be a package's directory, got {into!r}; {bad[0]!r} cannot be imported")
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--into must be a directory, got the file {into!r}; name the package it belongs to")
    return directory


def _import_root(directory: Path) -> Path:
    """What must be on Python's path: the first directory above that is no package. A new directory becomes one."""
    if directory.exists() and not (directory / "__init__.py").is_file():
        return directory
    root = directory.resolve().parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return _relative(root)


def _project_root(root: Path) -> Path:
    """Tests stand beside the package, or at the top of the project it belongs to (src layout)."""
    for candidate in (root.resolve(), *root.resolve().parents[:1]):
        if any((candidate / mark).exists() for mark in PROJECT_MARKS):
            return _relative(candidate)
    return root


def _relative(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _write(path: Path, text: str) -> str:
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before == text:
        return "as it was"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return "written  " if before is None else "changed  "
