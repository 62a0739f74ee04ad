"""Where tasks come from: `builtin:NAME`, `reasoning-gym:NAME`, `verifiers:ID`, `harbor:DIRECTORY`, files, directories,
hub ids, dicts, `datasets` objects.

Files are .jsonl or .parquet, or what `datasets` wrote with `save_to_disk`. A directory has splits: the first word of
each file's name (`train-00000.parquet` and `train.jsonl` are train), or the names that `datasets` gave them. A single
file has none; what is neither is left to `hub.py`. Tasks from files get `messages` (see `with_messages`); objects
that a user passes are taken as they are. `datasets` and pyarrow are imported only when a file needs them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from areal.api.errors import DatasetError
from areal.config.experiment import DatasetConfig
from areal.dataset import hub
from areal.dataset.builtin import SPLITS, TASKS
from areal.dataset.harbor import PREFIX as HARBOR
from areal.dataset.harbor import harbor_tasks
from areal.dataset.reasoning_gym import PREFIX as REASONING_GYM
from areal.dataset.reasoning_gym import reasoning_gym_tasks
from areal.dataset.verifiers import PREFIX as VERIFIERS
from areal.dataset.verifiers import verifiers_tasks
from areal.utils.installing import missing

Task = dict[str, Any]

TaskSource = Iterable[Mapping[str, Any]] | str | Path
"""A list of dicts, the path of a .jsonl or .parquet file or of a saved Dataset, a hub id, or a `datasets` Dataset."""

_VALIDATION = ("valid", "validation", "val", "dev")
"""Names of one split."""
_SAVED_MARKS = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` leaves in a directory."""
_SUFFIXES = (".jsonl", ".parquet")


def get_custom_dataset(split: str, dataset_config: DatasetConfig, tokenizer: Any = None) -> list[Task]:
    """The tasks that a config names; `split` applies where the config itself names none."""
    path = dataset_config.path
    if not path:
        raise DatasetError(
            f"no path for the {split} tasks; set train_dataset.path or valid_dataset.path "
            "to builtin:NAME, to a .jsonl or .parquet file or a directory of them, or to a hub id"
        )
    if path.startswith("builtin:"):
        tasks = _builtin(path.removeprefix("builtin:"), dataset_config.split or split, dataset_config.size)
    elif path.startswith(REASONING_GYM):
        tasks = reasoning_gym_tasks(path, dataset_config.split or split, dataset_config.size)
    elif path.startswith(VERIFIERS):
        tasks = verifiers_tasks(path, dataset_config.split or split, dataset_config.size)
    elif path.startswith(HARBOR):
        tasks = harbor_tasks(path, split, dataset_config.split, dataset_config.size)
    else:
        read = _read_path(Path(path), split, explicit_split=dataset_config.split, size=dataset_config.size)
        tasks = [with_messages(task) for task in read]
    if not tasks:
        raise DatasetError(f"{path} holds no task")
    return tasks


def read_tasks(source: TaskSource, split: str = "train") -> list[Task]:
    """Tasks from a path, a list of dicts, or anything that yields mappings (a `datasets` Dataset does).

    `split` applies where the path is a directory that has splits.
    """
    if isinstance(source, (str, Path)):
        source = [with_messages(task) for task in _read_path(Path(source), split)]
    tasks = []
    for number, item in enumerate(source):
        if not isinstance(item, Mapping):
            raise DatasetError(f"a task must be a dict, got {type(item).__name__} as number {number}: {item!r:.80}")
        tasks.append(dict(item))
    if not tasks:
        raise DatasetError("a dataset must hold at least one task, got none")
    return tasks


def with_messages(task: Mapping[str, Any]) -> Task:
    """The task with `messages`: its own, else its `question`, `prompt` or `problem`; a task with none is unchanged.

    Text becomes a user's message, a list is taken as messages. All other keys are kept.
    """
    if "messages" in task:
        return dict(task)
    for key in ("question", "prompt", "problem"):
        asked = task.get(key)
        if isinstance(asked, str):
            return {**task, "messages": [{"role": "user", "content": asked}]}
        if isinstance(asked, list) and asked:
            return {**task, "messages": asked}
    return dict(task)


def _builtin(name: str, split: str, size: int | None) -> list[Task]:
    if name not in TASKS:
        raise DatasetError(f"no built-in task {name!r}; there are {', '.join(TASKS)}")
    if split not in SPLITS:
        raise DatasetError(f"a built-in task has no split {split!r}; there are {', '.join(SPLITS)}")
    tasks = [problem.as_task() for problem in islice(TASKS[name].problems(split), size)]
    if size is not None and len(tasks) < size:
        raise DatasetError(f"builtin:{name} has {len(tasks)} {split} tasks, asked for {size}")
    return tasks


def _read_path(path: Path, split: str, *, explicit_split: str = "", size: int | None = None) -> list[Task]:
    """The first `size` tasks at `path`. A path without splits ignores `split` and refuses an `explicit_split`."""
    split = explicit_split or split
    try:
        path.exists()
    except OSError as error:  # a name that is too long, a directory that may not be read
        raise DatasetError(f"cannot read tasks from {str(path)[:200]!r}: {error.strerror}") from None
    if _is_for_datasets(path):
        return list(islice(_read_hub(str(path), split), size))
    if not path.is_dir():
        if explicit_split:
            raise DatasetError(
                f"split {split!r} is asked for, but a single file has no splits: {str(path)!r}; "
                "leave the split out, or name a directory with files train*.jsonl, test*.parquet"
            )
        return list(islice(_read_file(path), size))
    if any((path / mark).exists() for mark in _SAVED_MARKS):
        return list(islice(_read_saved(path, split, bool(explicit_split)), size))
    files = _files_of_split(path, split)
    return list(islice((task for file in files for task in _read_file(file)), size))


def _is_for_datasets(path: Path) -> bool:
    """Whether `datasets` has to find the tasks: a layout unlike those here, a subset, an id."""
    if path.is_dir():
        return not any((path / mark).exists() for mark in _SAVED_MARKS) and not _task_files(path)
    return not path.exists() and (Path(str(path).partition(":")[0]).is_dir() or hub.is_hub_id(str(path)))


def _read_hub(path: str, split: str) -> Iterable[Task]:
    name, bracket, _ = split.partition("[")
    splits = hub.load(path)
    chosen = _choose_split(list(splits), name, path)
    return hub.rows(hub.load(path, chosen + split[len(name) :]) if bracket else splits[chosen], path)


def _read_file(path: Path) -> Iterator[Task]:
    return _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)


def _read_jsonl(path: Path) -> Iterator[Task]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() also cuts inside JSON strings
    except OSError as error:
        raise DatasetError(f"cannot read tasks from {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} must be UTF-8 text: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(task, dict):
            raise DatasetError(f"{path} line {number} must be a JSON object, got {type(task).__name__}")
        yield task


def _read_parquet(path: Path) -> Iterator[Task]:
    parquet = _library("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except OSError as error:
        raise DatasetError(f"cannot read tasks from {str(path)!r}: {error.strerror or error}") from None
    except ValueError as error:  # what pyarrow raises for bytes that are not Parquet
        raise DatasetError(f"{path} is not a Parquet file: {error}") from None


def _read_saved(path: Path, split: str, is_explicit: bool) -> Iterable[Task]:
    saved = hub.load_saved(str(path))
    if isinstance(saved, dict):  # a DatasetDict, by split
        return hub.rows(saved[_choose_split(list(saved), split, path)], str(path))
    if is_explicit:
        raise DatasetError(
            f"split {split!r} is asked for, but {str(path)!r} is a single saved Dataset without splits; "
            "leave the split out, or save a DatasetDict"
        )
    return hub.rows(saved, str(path))


def _task_files(path: Path) -> list[Path]:
    """Where the directory itself holds none, those of its `data/`, as in Hugging Face repositories."""
    for directory in (path, path / "data"):
        files = [file for file in sorted(directory.glob("*")) if file.suffix in _SUFFIXES]
        if files:
            return files
    return []


def _files_of_split(path: Path, split: str) -> list[Path]:
    found: dict[str, list[Path]] = {}
    for file in _task_files(path):
        found.setdefault("".join(takewhile(str.isalpha, file.name)).lower(), []).append(file)
    return found[_choose_split(list(found), split, path)]


def _choose_split(names: list[str], split: str, path: Path | str) -> str:
    others: tuple[str, ...] = _VALIDATION if split in _VALIDATION else ()
    for name in [split, *others]:
        if name in names:
            return name
    raise DatasetError(
        f"no split {split!r} in {str(path)!r}; there are {', '.join(sorted(filter(None, names))) or 'none'}: "
        "set train_dataset.split or valid_dataset.split to one of them, or name files train*.jsonl, test*.parquet"
    )


def _library(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise DatasetError(missing(f"reading {str(path)!r} needs {name}", error, "datasets")) from error
