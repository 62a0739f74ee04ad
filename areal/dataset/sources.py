"""Where tasks come from: `builtin:NAME`, a .jsonl file, a list of dicts, a `datasets` Dataset."""

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from areal.api.errors import DatasetError
from areal.config.dataset import DatasetConfig
from areal.dataset.procedural import SPLITS, TASKS

Task = dict[str, Any]
TaskSource = Iterable[Mapping[str, Any]] | str | Path
"""A list of dicts, a .jsonl path, or a `datasets` Dataset."""


def get_custom_dataset(split: str, dataset_config: DatasetConfig, tokenizer: Any = None) -> list[Task]:
    """The tasks that a config names; `split` counts where the config itself names none."""
    path = dataset_config.path
    if not path:
        raise DatasetError(
            f"no path for the {split} tasks; set train_dataset.path or valid_dataset.path "
            "to builtin:NAME or to a .jsonl file"
        )
    if path.startswith("builtin:"):
        tasks = _builtin(path.removeprefix("builtin:"), dataset_config.split or split, dataset_config.size)
    else:
        tasks = list(islice(_jsonl(Path(path)), dataset_config.size))
    if not tasks:
        raise DatasetError(f"{path} holds no task")
    return tasks


def read_tasks(source: TaskSource) -> list[Task]:
    """Tasks from a .jsonl path, a list of dicts, or anything that yields mappings (a `datasets` Dataset does)."""
    items = _jsonl(Path(source)) if isinstance(source, (str, Path)) else source
    tasks = []
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise DatasetError(f"a task must be a dict, got {type(item).__name__} as number {number}: {item!r:.80}")
        tasks.append(dict(item))
    if not tasks:
        raise DatasetError("a dataset must hold at least one task, got none")
    return tasks


def _builtin(name: str, split: str, size: int | None) -> list[Task]:
    if name not in TASKS:
        raise DatasetError(f"no built-in task {name!r}; there are {', '.join(TASKS)}")
    if split not in SPLITS:
        raise DatasetError(f"a built-in task has no split {split!r}; there are {', '.join(SPLITS)}")
    tasks = [problem.as_task() for problem in islice(TASKS[name].problems(split), size)]
    if size is not None and len(tasks) < size:
        raise DatasetError(f"builtin:{name} has {len(tasks)} {split} tasks, asked for {size}")
    return tasks


def _jsonl(path: Path) -> Iterable[Task]:
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
        except ValueError as error:
            raise DatasetError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(task, dict):
            raise DatasetError(f"{path} line {number} must be a JSON object, got {type(task).__name__}")
        yield task
