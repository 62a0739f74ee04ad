"""`areal new workflow NAME` and `areal new agent NAME`: a first version that trains, and its test.

`areal new --example` is in `examples.py`.

Everything is decided before a file is touched. In a checkout of this repository, `areal/workflow/__init__.py` exports
the new name; an `__init__.py` of a user's package is not edited, the line to add is printed.
"""

import argparse
import ast
import importlib.util
import json
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from areal.api.errors import ConfigError
from areal.cli.new.examples import copy_example, is_taken, list_examples, write_file
from areal.cli.new.templates import KINDS
from areal.utils.installing import install_hint

CHECKOUT = Path("areal/workflow")
"""Where workflows go in a checkout of this repository."""
PROJECT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
LINE_LENGTH = 120


def run(args: argparse.Namespace) -> int:
    if args.example is not None:
        return _copy_or_list(args)
    if args.kind is None or args.name is None:
        raise ConfigError(
            "areal new takes a kind and a name, or --example; for instance areal new agent my_agent, or, for a list, "
            "areal new --example"
        )
    plan = make_plan(args.kind, args.name, args.into, force=args.force)
    for path, text in plan.files.items():
        print(f"{_write(path, text)}  {path}")
    print()
    for verb, line in plan.commands.items():
        print(f"{verb:<13}{line}")
    if importlib.util.find_spec("pytest_asyncio") is None:
        print(f"its test needs pytest and pytest-asyncio: {install_hint('test')}", file=sys.stderr)
    return 0


def _copy_or_list(args: argparse.Namespace) -> int:
    if args.kind is not None:
        raise ConfigError(
            f"--example takes one name and nothing else, got {args.kind!r} too; for another place add --into"
        )
    print(copy_example(args.example, args.into, force=args.force) if args.example else list_examples())
    return 0


@dataclass(frozen=True)
class FilePlan:
    files: dict[Path, str]
    """What each file is to hold."""
    commands: dict[str, str]
    """What to do next: verb -> the line that does it."""


def make_plan(kind: str, name: str, into: str | None, *, force: bool) -> FilePlan:
    """Raises ConfigError for a bad name, an impossible place, or a file that would be overwritten."""
    template = KINDS[kind]
    _check_name(name)
    directory = _directory(into)
    root = _import_root(directory)
    package = ".".join(directory.resolve().relative_to(root.resolve()).parts)
    module = f"{package}.{name}" if package else name
    _check_shadow(module.partition(".")[0], root)
    class_name = _class_name(name, template.suffix)
    own = directory / f"{name}.py"
    test = _project_root(root) / "tests" / f"test_{name.removesuffix(f'_{kind}')}_{kind}.py"
    for path in (own, test):
        if path.exists() and not force:
            raise ConfigError(f"areal new writes new files, but {path} exists; choose another name or add --force")
    is_ours = module.startswith("areal.")
    words = {
        "class_name": class_name,
        "module": module,
        # Import sorters keep a project's own modules apart from installed ones, and areal may be either.
        "blank_in_checkout": "\n" if is_ours else "",
        "blank_elsewhere": "" if is_ours else "\n",
    }
    files = {own: template.code.substitute(words), test: template.test.substitute(words)}
    commands = _commands(f"{module}.{class_name}", test, template.reward_fn)
    if package:
        init, line = directory / "__init__.py", f"from {module} import {class_name}"
        if not init.exists():
            files[init] = f'{line}\n\n__all__ = ["{class_name}"]\n'
        elif package == "areal.workflow":
            files[init] = with_export(init.read_text(encoding="utf-8"), module, class_name)
        elif class_name not in init.read_text(encoding="utf-8"):
            commands["export it"] = f"{line}  # add to {init}"
    return FilePlan(files, commands)


def with_export(text: str, module: str, name: str) -> str:
    """`areal/workflow/__init__.py` with one more name in its three lists: imports, modules and `__all__`."""
    text = _with_line(text, r"    from areal\.workflow\.\S+ import \w+\n", f"    from {module} import {name}\n")
    text = _with_line(text, r'    "\w+": "areal\.workflow\.\S+",\n', f'    "{name}": "{module}",\n')
    before = re.search(r"^__all__ = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    if before is None:
        raise ConfigError(f"{CHECKOUT}/__init__.py must set __all__ to a list of names; restore it first")
    names = sorted({*ast.literal_eval(before[1]), name})
    after = f"__all__ = {json.dumps(names)}"
    if len(after) > LINE_LENGTH:
        after = "__all__ = [\n" + "".join(f'    "{each}",\n' for each in names) + "]"
    return text.replace(before[0], after)


def _with_line(text: str, pattern: str, line: str) -> str:
    """One more line, in its place, in the sorted block of lines that match."""
    block = re.search(f"(?:{pattern})+", text)
    if block is None:
        raise ConfigError(f"{CHECKOUT}/__init__.py must have lines like {line.strip()!r}; restore them first")
    return text.replace(block[0], "".join(sorted({*block[0].splitlines(keepends=True), line})))


def _commands(workflow: str, test: Path, reward_fn: str) -> dict[str, str]:
    kwargs = f', workflow_kwargs={{"reward_fn": "{reward_fn}"}}' if reward_fn else ""
    given = f" reward_fn={reward_fn}" if reward_fn else ""
    return {
        "test it": f"python -m pytest {test}",
        "check it": f"areal check {workflow}{given}",
        "train it": f"areal train --demo workflow={workflow}{given}",
        "in a script": f'trainer.train(workflow="{workflow}"{kwargs})',
    }


def _check_name(name: str) -> None:
    if keyword.iskeyword(name) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        near = re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower().strip("_")
        offer = f"; try {near}" if near != name and re.fullmatch(r"[a-z][a-z0-9_]*", near) else ""
        raise ConfigError(
            f"a name must be a module's: lowercase letters, digits and _, not a keyword, got {name!r}{offer}"
        )


def _check_shadow(top: str, root: Path) -> None:
    """Refuse a new module or package that would hide an existing one."""
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
    taken = is_taken(directory)
    bad = [part for part in directory.parts if part not in ("/", ".", "..") and not part.isidentifier()]
    if bad and not directory.is_dir():
        raise ConfigError(f"--into must be a package's directory, got {into!r}; {bad[0]!r} cannot be imported")
    if taken:
        raise ConfigError(f"--into must be a directory, got the file {into!r}; name the package it belongs to")
    return directory


def _import_root(directory: Path) -> Path:
    """What must be on Python's path: the first directory above that is not a package. A new directory becomes one."""
    if directory.exists() and not (directory / "__init__.py").is_file():
        return directory
    root = directory.resolve().parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return _relative(root)


def _project_root(root: Path) -> Path:
    """Where `tests/` goes: next to the package, or at the top of its project (src layout)."""
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
        return "unchanged"
    write_file(path, text.encode())
    return "written  " if before is None else "changed  "
