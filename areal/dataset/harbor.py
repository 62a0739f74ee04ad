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
_WITHOUT_EFFECT = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER"}
"""Instructions of a Dockerfile that matter to a container only; `VOLUME` and `ONBUILD` are refused."""


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
            workdir=str(environment.get("workdir") or built.workdir),
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
    directory = Path(name).expanduser().resolve()
    if not directory.is_dir():
        raise DatasetError(f"there is no directory {name!r}; name one of Harbor tasks, as in {PREFIX}tasks/hello-world")
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


def _as_task(task: HarborTask, settings: Mapping[str, str]) -> dict[str, Any]:
    messages = [{"role": "user", "content": task.instruction.strip()}]
    return {"messages": messages, "harbor": {"name": task.directory.name, "directory": str(task.directory), **settings}}


def _choose(splits: list[str], split: str, name: str) -> str:
    names = _VALIDATION if split in _VALIDATION else (split,)
    found = next((each for each in splits if each in names), None)
    if found is None:
        raise DatasetError(f"no split {split!r} in {name!r}; there are {', '.join(splits)}")
    return found


def _directories(directory: Path) -> Iterator[Path]:
    """Those of tasks at or below `directory`, in the order of their names."""
    if (directory / "task.toml").is_file():
        yield directory
        return
    for below in sorted(each for each in directory.iterdir() if each.is_dir() and not each.name.startswith(".")):
        yield from _directories(below)


def _config(directory: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(directory / "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise DatasetError(f"{directory / 'task.toml'} is not TOML: {error}") from None


def _text(path: Path) -> str:
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
    return {str(name): str(value) for name, value in variables.items()}


def _seconds(directory: Path, table: Mapping[str, Any]) -> float:
    seconds = table.get("timeout_sec", _DEFAULT_SECONDS)
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or seconds <= 0:
        raise DatasetError(f"timeout_sec in {directory / 'task.toml'} must be a number > 0, got {seconds!r:.60}")
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
        if word == "FROM":
            self._stages += 1
            if self._stages > 1:
                raise self._refused(word, rest, "a sandbox has no stages")
        elif word == "WORKDIR":
            self.workdir = str(PurePosixPath(self.workdir) / rest.strip())
        elif word in ("ENV", "ARG"):
            self.variables |= _assignments(word, rest)
        elif word in ("COPY", "ADD"):
            self.steps += self._copies(word, rest)
        elif word == "RUN":
            self.steps.append(RunCommand(_command(rest), self.workdir, dict(self.variables)))
        elif word not in _WITHOUT_EFFECT:
            raise self._refused(word, rest, "a sandbox cannot follow it")

    def _copies(self, word: str, rest: str) -> list[CopiedFiles]:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        flags = [each for each in words if each.startswith("--")]
        *sources, place = [each for each in words if each not in flags]
        if not sources or any(each.startswith("--from") for each in flags) or any("://" in each for each in sources):
            raise self._refused(word, rest, "only files beside it can be copied")
        target = PurePosixPath(self.workdir) / place
        found = [(source, path) for source in sources for path in self._matches(word, rest, source)]
        into = place.endswith(("/", "/.")) or place == "." or len(found) > 1
        return [CopiedFiles(path, str(target / path.name if into and path.is_file() else target)) for _, path in found]

    def _matches(self, word: str, rest: str, source: str) -> list[Path]:
        context = self._context.resolve()
        paths = [context] if source in (".", "./") else sorted(context.glob(source.removeprefix("./").lstrip("/")))
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


def _assignments(word: str, rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if word == "ENV" and words and "=" not in words[0]:  # the older form, `ENV name value`
        return {words[0]: " ".join(words[1:])}
    return dict(each.split("=", 1) for each in words if "=" in each)


def _command(rest: str) -> str:
    while rest.startswith("--"):  # such as --mount=type=cache, which is nothing here
        rest = rest.partition(" ")[2].lstrip()
    return shlex.join(json.loads(rest)) if rest.startswith("[") else rest
