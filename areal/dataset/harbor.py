"""Task directories as Harbor lays them out: `harbor:DIRECTORY`, one of them or many.

    instruction.md            what the model is told
    task.toml                 time limits and variables ([agent], [verifier], [environment])
    environment/Dockerfile    what is there before it begins; the files it copies lie beside it
    tests/test.sh             writes the reward to /logs/verifier/reward.txt or reward.json

Directories `train` and `test` of DIRECTORY are its splits. A task names its directory, so workers must be able to read
it: `areal.workflow.HarborWorkflow` does. What needs a container (an image, several services) is refused here, with the
reason.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl

from areal.api.errors import DatasetError

PREFIX = "harbor:"
ANSWER_FILE = "answer_file"
"""The one setting: a path that the answer is written to, in place of being run."""
_VALIDATION = ("valid", "validation", "val", "dev")
_SPLITS = ("train", "test", *_VALIDATION)
_DEFAULT_WORKDIR = "/app"
_DEFAULT_SECONDS = 600.0
_MOST_SECONDS = 7 * 86400.0
PROGRAMS_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME = "/scratch/home"
_USUAL_VARIABLES = {"PATH": PROGRAMS_PATH, "HOME": HOME}
"""What a sandbox has before a Dockerfile sets anything, so that `ENV PATH=/app/bin:$PATH` keeps the rest."""
_WITHOUT_EFFECT = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER"}
"""Instructions of a Dockerfile that matter to a container only; `VOLUME` and `ONBUILD` are refused."""
_LITERAL = re.compile(r"""\"(?:\\.|[^"\\])*\"|'[^']*'|\\\$""")
"""Parts of a line in which a dollar may be no variable's: between quotes, and after a backslash."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
_DOLLAR = "\0"
"""Stands for one that is no variable's; no line has this character itself."""


@dataclass(frozen=True)
class CopiedFiles:
    """A file or a directory of the task that goes to an absolute path."""

    source: Path
    place: str


@dataclass(frozen=True)
class RunCommand:
    """A command that a Dockerfile runs."""

    command: str
    workdir: str
    variables: dict[str, str]


@dataclass(frozen=True)
class HarborTask:
    directory: Path
    instruction: str
    workdir: str
    steps: list[CopiedFiles | RunCommand]
    """What the Dockerfile does, in order; its FROM is not followed."""
    variables: dict[str, str] = field(default_factory=dict)
    verifier_variables: dict[str, str] = field(default_factory=dict)
    agent_seconds: float = _DEFAULT_SECONDS
    verifier_seconds: float = _DEFAULT_SECONDS

    @classmethod
    def read(cls, directory: Path) -> "HarborTask":
        config = _config(directory)
        environment = _table(directory, config, "environment")
        _refuse_containers(directory, config, environment)
        dockerfile = directory / "environment" / "Dockerfile"
        built = _Built(directory)
        if dockerfile.is_file():
            for word, rest in _instructions(_text(dockerfile)):
                built.follow(word, rest)
        if not (directory / "tests" / "test.sh").is_file():
            raise DatasetError(f"a Harbor task must have tests/test.sh, {str(directory)!r} has none")
        return cls(
            directory=directory,
            instruction=_text(directory / "instruction.md"),
            workdir=_workdir(directory, environment) or built.workdir,
            steps=built.steps,
            variables=built.variables | _variables(directory, environment),
            verifier_variables=_variables(directory, _table(directory, config, "verifier")),
            agent_seconds=_seconds(directory, _table(directory, config, "agent")),
            verifier_seconds=_seconds(directory, _table(directory, config, "verifier")),
        )


def harbor_tasks(path: str, split: str, explicit_split: str, size: int | None) -> list[dict[str, Any]]:
    """The first `size` tasks below a directory; None = all. One without splits ignores `split`, but no explicit one."""
    name, _, query = path.removeprefix(PREFIX).partition("?")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    if set(settings) - {ANSWER_FILE}:
        raise DatasetError(
            f"{PREFIX}DIRECTORY has no setting {min(set(settings) - {ANSWER_FILE})!r}; there is {ANSWER_FILE}"
        )
    directory = _existing(name)
    splits = [each for each in _SPLITS if (directory / each).is_dir()]
    if splits:
        directory /= _choose(splits, explicit_split or split, name)
    elif explicit_split:
        raise DatasetError(
            f"split {explicit_split!r} is asked for, but {name!r} has no splits; leave the split out, or put its tasks "
            "into directories train and test"
        )
    tasks = [_as_task(HarborTask.read(found), settings) for found in islice(_directories(directory), size)]
    if not tasks:
        raise DatasetError(f"{name!r} holds no Harbor task; each is a directory with task.toml and instruction.md")
    return tasks


def _existing(name: str) -> Path:
    try:
        directory = Path(name).expanduser().resolve()
        if directory.is_dir():
            return directory
    except (OSError, ValueError, RuntimeError):  # too long, no text, the home of nobody
        pass
    raise DatasetError(
        f"there is no directory {name[:200]!r}; name one of Harbor tasks, as in {PREFIX}tasks/hello-world"
    )


def _as_task(task: HarborTask, settings: Mapping[str, str]) -> dict[str, Any]:
    messages = [{"role": "user", "content": task.instruction.strip()}]
    return {"messages": messages, "harbor": {"name": task.directory.name, "directory": str(task.directory), **settings}}


def _choose(splits: list[str], split: str, name: str) -> str:
    names = _VALIDATION if split in _VALIDATION else (split,)
    found = next((each for each in splits if each in names), None)
    if found is None:
        raise DatasetError(f"no split {split!r} in {name!r}; there are {', '.join(splits)}")
    return found


def _directories(directory: Path, seen: set[Path] | None = None) -> Iterator[Path]:
    """Those of tasks at or below `directory`, in the order of their names; each once, wherever links lead."""
    seen = set() if seen is None else seen
    if directory.resolve() in seen:
        return
    seen.add(directory.resolve())
    if (directory / "task.toml").is_file():
        try:
            str(directory).encode()
        except UnicodeEncodeError:
            raise DatasetError(
                f"the directory of a Harbor task must have a UTF-8 name, got {str(directory)!r}"
            ) from None
        yield directory
        return
    try:
        below = sorted(each for each in directory.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError as error:
        raise DatasetError(f"cannot look for Harbor tasks in {str(directory)!r}: {error.strerror}") from None
    for each in below:
        yield from _directories(each, seen)


def _config(directory: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(directory / "task.toml"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DatasetError(f"{directory / 'task.toml'} is not TOML: {error}") from None


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():  # reading a pipe would wait for whoever writes to it
        raise DatasetError(f"{path.name} of a Harbor task must be a file, {str(path)!r} is none")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DatasetError(f"a Harbor task must have {path.name}, but {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} must be UTF-8 text: {error}") from None


def _table(directory: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise DatasetError(f"[{name}] of {directory / 'task.toml'} must be a table, got {table!r:.60}")
    return table


def _variables(directory: Path, table: Mapping[str, Any]) -> dict[str, str]:
    variables = table.get("env", {})
    if not isinstance(variables, dict):
        raise DatasetError(f"env in {directory / 'task.toml'} must be a table, got {variables!r:.60}")
    for name, value in variables.items():
        if not name or "=" in name or "\0" in f"{name}{value}":
            raise DatasetError(
                f"env in {directory / 'task.toml'} must have names without = and values without a zero byte, got "
                f"{name!r:.60} = {value!r:.60}"
            )
    return {name: str(value) for name, value in variables.items()}


def _workdir(directory: Path, environment: Mapping[str, Any]) -> str:
    workdir = environment.get("workdir", "")
    if not isinstance(workdir, str):
        raise DatasetError(f"workdir in {directory / 'task.toml'} must be a path, got {workdir!r:.60}")
    return workdir


def _seconds(directory: Path, table: Mapping[str, Any]) -> float:
    seconds = table.get("timeout_sec", _DEFAULT_SECONDS)
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= _MOST_SECONDS:  # TOML has inf and nan
        raise DatasetError(
            f"timeout_sec in {directory / 'task.toml'} must be a number > 0 and <= {_MOST_SECONDS:.0f} (a week), got "
            f"{seconds!r:.60}"
        )
    return float(seconds)


def _refuse_containers(directory: Path, config: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    compose = [
        name for name in ("docker-compose.yaml", "docker-compose.yml") if (directory / "environment" / name).exists()
    ]
    needs = [
        (bool(compose), "several services (docker-compose)"),
        (bool(environment.get("docker_image")), f"the image {environment.get('docker_image')!r}"),
        (str(environment.get("os", "linux")).lower() != "linux", f"the system {environment.get('os')!r}"),
        ("steps" in config, "several steps ([[steps]])"),
    ]
    for applies, what in needs:
        if applies:
            raise DatasetError(
                f"Harbor tasks run in a sandbox of this machine, and {str(directory)!r} needs {what}; leave it out"
            )


class _Built:
    """What a Dockerfile says, as far as a sandbox can follow it."""

    def __init__(self, directory: Path) -> None:
        self.workdir = _DEFAULT_WORKDIR
        self.steps: list[CopiedFiles | RunCommand] = []
        self.variables: dict[str, str] = {}
        self._context = directory / "environment"
        self._file = self._context / "Dockerfile"
        self._stages = 0

    def follow(self, word: str, rest: str) -> None:
        try:
            self._follow(word, rest)
        except ValueError as error:  # what shlex says of quotes that do not end
            raise self._refused(word, rest, f"that cannot be read: {error}") from None

    def _follow(self, word: str, rest: str) -> None:
        if word == "FROM":
            self._stages += 1
            if self._stages > 1:
                raise self._refused(word, rest, "a sandbox has no stages")
        elif word == "WORKDIR":
            self.workdir = str(PurePosixPath(self.workdir) / " ".join(self._words(rest)))
        elif word in ("ENV", "ARG"):
            self.variables |= _assignments(word, self._words(rest))
        elif word in ("COPY", "ADD"):
            self.steps += self._copies(word, rest)
        elif word == "RUN":
            self.steps.append(RunCommand(_command(rest), self.workdir, dict(self.variables)))
        elif word not in _WITHOUT_EFFECT:
            raise self._refused(word, rest, "a sandbox cannot follow it")

    def _words(self, rest: str) -> list[str]:
        """As a shell reads them, with the values of variables."""
        marked = _LITERAL.sub(_mark_dollars, rest.replace(_DOLLAR, ""))
        return [_VARIABLE.sub(self._value, each).replace(_DOLLAR, "$") for each in shlex.split(marked)]

    def _value(self, found: re.Match[str]) -> str:
        value = (_USUAL_VARIABLES | self.variables).get(found[1] or found[2], "")
        if found[3] is None:
            return value
        return (value or found[4]) if found[3] == "-" else (found[4] if value else "")

    def _copies(self, word: str, rest: str) -> list[CopiedFiles]:
        words = _exec_form(rest) or self._words(rest)
        flags = [each for each in words if each.startswith("--")]
        *sources, place = [each for each in words if each not in flags] or [""]
        if not sources or any(each.startswith("--from") for each in flags) or any("://" in each for each in sources):
            raise self._refused(word, rest, "only files beside it can be copied")
        target = PurePosixPath(self.workdir) / place
        found = [(source, path) for source in sources for path in self._matches(word, rest, source)]
        into = place.endswith(("/", "/.")) or place == "." or len(found) > 1
        return [CopiedFiles(path, str(target / path.name if into and path.is_file() else target)) for _, path in found]

    def _matches(self, word: str, rest: str, source: str) -> list[Path]:
        context = self._context.resolve()
        pattern = source.removeprefix("./").lstrip("/")
        paths = [context] if source in (".", "./", "/") else sorted(context.glob(pattern)) if pattern else []
        if not paths or not all(path.resolve().is_relative_to(context) for path in paths):
            raise self._refused(word, rest, f"there is no {source!r} beside it")
        return paths

    def _refused(self, word: str, rest: str, why: str) -> DatasetError:
        return DatasetError(f"{self._file} says `{word} {rest:.80}`, and {why}; leave the task out, or change it")


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        yield word.upper(), rest.strip()


def _mark_dollars(literal: re.Match[str]) -> str:
    return literal[0].replace("$" if literal[0].startswith("'") else "\\$", _DOLLAR)


def _assignments(word: str, words: list[str]) -> dict[str, str]:
    if word == "ENV" and words and "=" not in words[0]:  # the older form, `ENV name value`
        return {words[0]: " ".join(words[1:])}
    pairs = [each.split("=", 1) for each in words if "=" in each]
    if not all(name for name, _ in pairs):
        raise ValueError("a variable must have a name")
    return dict(pairs)


def _command(rest: str) -> str:
    while rest.startswith("--"):  # such as --mount=type=cache, which is nothing here
        rest = rest.partition(" ")[2].lstrip()
    words = _exec_form(rest)
    return rest if words is None else shlex.join(words)


def _exec_form(rest: str) -> list[str] | None:
    """The words of `["a", "b"]`; None = it is a shell's line, which may begin with a bracket too."""
    try:
        words = json.loads(rest)
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, list) and all(isinstance(each, str) for each in words) else None
