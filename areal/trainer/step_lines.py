"""A file of JSON lines that each name their training step, and that a resumed run continues without repeating itself.

Owns the format only: what a line says is its writer's business.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson


class StepLines:
    """Append-only; every line reaches the operating system before `append` returns."""

    def __init__(self, path: Path, start_step: int = 0) -> None:
        """Continue `path`, without the lines of `start_step` and later, which the run is about to write again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep(path, (row for row in read_lines(path) if row["step"] < start_step))
        self._file = path.open("ab", buffering=0)

    def append(self, row: dict[str, Any]) -> None:
        self._file.write(_line(row))

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; a last line that a killed process left half-written is not one."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield orjson.loads(line)


def _line(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # a model may call a tool with a number beyond 64 bits, which orjson refuses
        return json.dumps(row, default=lambda value: value.tolist()).encode() + b"\n"


def _keep(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Rewrite in full beside the file, then swap: a crash leaves the old file or the new one, never less."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("wb") as file:
        for row in rows:
            file.write(_line(row))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
