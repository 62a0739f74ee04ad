"""Where tasks come from: `builtin:NAME`, files and directories, a list of dicts, a `datasets` Dataset.

Tasks of files are posed: they get `messages` (see `posed`). Objects that a user hands over are taken as they are.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from areal.api.errors import DatasetError
from areal.config.dataset import DatasetConfig
from areal.dataset.files import Task, posed, read_path
from areal.dataset.procedural import ELSEWHERE, SPLITS, TASKS, find_task

TaskSource = Iterable[Mapping[str, Any]] | str | Path
"""A list of dicts, the path of a .jsonl or .parquet file or of a Dataset that was saved, or a `datasets` Dataset."""


def get_custom_dataset(split: str, dataset_config: DatasetConfig, tokenizer: Any = None) -> list[Task]:
    """The tasks that a config names; `split` counts where the config itself names none."""
    path = dataset_config.path
    if not path:
        raise DatasetError(
            f"no path for the {split} tasks; set train_dataset.path or valid_dataset.path "
            "to builtin:NAME, or to a .jsonl or .parquet file or a directory of them"
        )
    if path.startswith("builtin:"):
        tasks = _builtin(path.removeprefix("builtin:"), dataset_config.split or split, dataset_config.size)
    else:
        asked = dataset_config.split
        read = read_path(Path(path), asked or split, asked=bool(asked), size=dataset_config.size)
        tasks = [posed(task) for task in read]
    if not tasks:
        raise DatasetError(f"{path} holds no task")
    return tasks


def read_tasks(source: TaskSource, split: str = "train") -> list[Task]:
    """Tasks from a path, a list of dicts, or anything that yields mappings (a `datasets` Dataset does).

    `split` counts where the path is a directory that has splits.
    """
    if isinstance(source, (str, Path)):
        source = [posed(task) for task in read_path(Path(source), split, asked=False)]
    tasks = []
    for number, item in enumerate(source):
        if not isinstance(item, Mapping):
            raise DatasetError(f"a task must be a dict, got {type(item).__name__} as number {number}: {item!r:.80}")
        tasks.append(dict(item))
    if not tasks:
        raise DatasetError("a dataset must hold at least one task, got none")
    return tasks


def _builtin(name: str, split: str, size: int | None) -> list[Task]:
    task = find_task(name)
    if task is None:
        raise DatasetError(f"no built-in task {name!r}; there are {', '.join([*TASKS, *ELSEWHERE])}")
    if split not in SPLITS:
        raise DatasetError(f"a built-in task has no split {split!r}; there are {', '.join(SPLITS)}")
    tasks = [problem.as_task() for problem in islice(task.problems(split), size)]
    if size is not None and len(tasks) < size:
        raise DatasetError(f"builtin:{name} has {len(tasks)} {split} tasks, asked for {size}")
    return tasks
