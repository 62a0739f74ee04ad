"""`areal new --example NAME`: an example of the repository, copied to where it can be run and changed.

Examples are files of the repository. A wheel carries them next to this module (`setup.py` puts them there), so both
have the same. A copy keeps its path, `examples/NAME`, because the example's own commands, settings and modules use it.
Everything is decided before a file is touched.
"""

import os
import re
import shlex
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

from areal.api.errors import ConfigError
from areal.cli.parsers import did_you_mean

CARRIED = Path(__file__).with_name("example_files")
"""Where a wheel has them."""
REPOSITORY = Path(__file__).resolve().parents[3] / "examples"
MADE_BY_RUNS = {"runs", "__pycache__"}
"""Directories that are no part of an example."""
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTSIDE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
"""To a file that is not copied along."""


@dataclass(frozen=True)
class Example:
    name: str
    directory: Path
    readme: str

    @property
    def summary(self) -> str:
        """The first sentence below the title."""
        paragraph = self.readme.partition("\n\n")[2].partition("\n\n")[0]
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        return re.split(r"(?<=\.) (?=[A-Z])", plain)[0]

    @property
    def commands(self) -> str:
        """How it is run: the README's first block."""
        block = COMMANDS.search(self.readme)
        return "" if block is None else block[1]

    def files(self) -> list[Path]:
        """Relative to its directory."""
        found = (path.relative_to(self.directory) for path in self.directory.rglob("*") if path.is_file())
        return sorted(path for path in found if not MADE_BY_RUNS & set(path.parts))

    def needs(self) -> set[str]:
        """Other examples whose files its commands use."""
        blocks = "".join(COMMANDS.findall(self.readme))
        return set(re.findall(r"(?<![\w/])examples/(\w+)/", blocks)) - {self.name}


def list_examples() -> str:
    """Names and what each shows, for a terminal."""
    known = known_examples()
    indent = max(map(len, known)) + 2
    lines = [
        textwrap.fill(
            f"{each.name:<{indent}}{each.summary}",
            width=max(shutil.get_terminal_size().columns, 2 * indent),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for each in known.values()
    ]
    return "\n".join([*lines, "", "areal new --example NAME copies one"])


def known_examples() -> dict[str, Example]:
    home = CARRIED if CARRIED.is_dir() else REPOSITORY
    readmes = sorted(home.glob("*/README.md"))
    if not readmes:
        raise ConfigError(f"the examples must be in {home}, but are not; install areal-agents again")
    return {path.parent.name: Example(path.parent.name, path.parent, path.read_text("utf-8")) for path in readmes}


def copy_example(name: str, into: str | None, *, force: bool) -> str:
    """What to tell the user. Raises ConfigError for an unknown name, or a file that would be overwritten."""
    known = known_examples()
    if name not in known:
        near = did_you_mean(name, known) or f"; there are {', '.join(known)}"
        raise ConfigError(f"--example must name an example, got {name!r}{near}")
    root = Path(into or "")
    if is_taken(root):
        raise ConfigError(f"--into must be a directory, got the file {into!r}; name the one that gets examples/{name}")
    chosen = [known[name], *(known[each] for each in sorted(known[name].needs() & known.keys()))]
    contents: dict[Path, bytes] = {}
    for example in chosen:
        place = root / "examples" / example.name
        if place.resolve() != example.directory.resolve():  # in a clone it is there already
            contents |= {place / path: _content(example.directory / path) for path in example.files()}
    for path in contents:
        in_the_way = [each for each in path.parents if is_taken(each)]
        if os.path.lexists(path) and not path.is_file():
            in_the_way.append(path)
        if in_the_way:
            raise ConfigError(
                f"areal new writes {path}, but {in_the_way[0]} is something else; move it, or add --into DIR"
            )
    before = {path: path.read_bytes() for path in contents if path.is_file()}
    changed = [path for path in before if before[path] != contents[path]]
    if changed and not force:
        raise ConfigError(
            f"areal new writes new files, but {changed[0]} exists and differs; add --force, or --into DIR"
        )
    for path, content in contents.items():
        if before.get(path) != content:
            write_file(path, content)
    return "\n".join([*_written(contents, before), "", *_how_to_run(known[name], root)])


def is_taken(directory: Path) -> bool:
    """Whether something that is no directory has its name, such as a file, or a link to nothing."""
    try:
        return (directory.exists() or directory.is_symlink()) and not directory.is_dir()
    except OSError as error:
        raise ConfigError(f"{str(directory)[:200]!r} can be no directory: {error.strerror}; name another") from None


def write_file(path: Path, content: bytes) -> None:
    """With the directories above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"areal new cannot write {str(path)[:200]!r}: {error.strerror}; name another place with --into"
        ) from None


def _content(path: Path) -> bytes:
    """A README speaks of the repository, where it is not any more."""
    if path.suffix != ".md":
        return path.read_bytes()
    text = OUTSIDE_LINK.sub(r"\1", path.read_text("utf-8"))
    return text.replace("the root of the repository", "the directory that has `examples/`").encode()


def _written(contents: dict[Path, bytes], before: dict[Path, bytes]) -> list[str]:
    words = {None: "written  ", True: "unchanged", False: "changed  "}
    told = {path: None if path not in before else before[path] == content for path, content in contents.items()}
    return [f"{words[same]}  {path}" for path, same in told.items()] or ["it is here already"]


def _how_to_run(example: Example, root: Path) -> list[str]:
    lines = example.commands.splitlines()
    if os.path.normpath(root) != ".":
        lines.insert(0, f"cd {shlex.quote(str(root))}")
    about = root / "examples" / example.name / "README.md"
    return ["run it", *(f"  {line}" if line else "" for line in lines), f"about it: {about}"]
