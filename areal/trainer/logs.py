"""What a run writes down as it goes, a JSON object per line:

- `MetricsLog`: the figures of each step, in RUN/metrics.jsonl, for TensorBoard in RUN/tensorboard/, and for /metrics.
- `RolloutLog`: every episode that was trained on, in RUN/rollouts.jsonl.

Every line names its step, so that a resumed run drops the steps it is about to take again and continues the file.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from areal.api.messages import Episode
from areal.utils.closing import Closing
from areal.utils.logging import getLogger

if TYPE_CHECKING:  # it loads what answers HTTP requests, which few runs need
    from areal.trainer.exporter import Exporter

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"

logger = getLogger("trainer")


class MetricsLog(Closing):
    def __init__(self, run_dir: str | Path, start_step: int = 0, exporter: "Exporter | None" = None) -> None:
        """`start_step` is the first step that will be written; existing rows of it and of later steps are dropped."""
        # Imported here because it takes a tenth of a second and only a run that is being trained needs it.
        from tensorboardX import SummaryWriter

        self._lines = _StepLines(Path(run_dir) / METRICS_FILE, start_step)
        self._board: Any = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=start_step or None)
        self._exporter = exporter

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a row. A value that is not finite becomes null in the file: JSON cannot express it."""
        finite = {name: _finite(value) for name, value in values.items() if name != "step"}
        self._lines.append({"step": step, **finite})
        for name, value in finite.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
        if self._exporter is not None:
            self._exporter.step(step, values)

    def close(self) -> None:
        self._lines.close()
        self._board.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows written so far, oldest first; none if the run has not begun."""
    path = Path(run_dir) / METRICS_FILE
    return list(read_lines(path)) if path.exists() else []


def _finite(value: float | None) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


class RolloutLog(Closing):
    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        """`start_step` is as in `MetricsLog`."""
        self._lines = _StepLines(Path(run_dir) / ROLLOUTS_FILE, start_step)

    def append(self, step: int, task_id: int, episode: Episode) -> None:
        self._lines.append(
            {
                "step": step,
                "task_id": task_id,
                "reward": episode.reward,
                "messages": episode.messages,
                "version_min": episode.oldest_version,
                "version_max": episode.newest_version,
                "tokens": episode.trained_tokens,
                "calls": episode.calls,
                "seconds": round(episode.seconds, 4),
                "turns": [(round(asked, 4), round(answered, 4), tokens) for asked, answered, tokens in episode.turns],
            }
        )

    def close(self) -> None:
        self._lines.close()


class _StepLines:
    """An append-only file; every line reaches the operating system before `append` returns."""

    def __init__(self, path: Path, start_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _rewrite(path, (line for line, row in _whole_lines(path) if row["step"] < start_step))
        self._file = path.open("ab", buffering=0)

    def append(self, row: dict[str, Any]) -> None:
        self._file.write(_line(row))

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that can be read."""
    return (row for _, row in _whole_lines(path))


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line with its row, without an incomplete last one, which a killed process may leave, and damaged ones."""
    damaged = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                continue
            row = _row(line)
            if row is None:
                damaged += 1
            else:
                yield line, row
    if damaged:
        lines = "1 damaged line, which is" if damaged == 1 else f"{damaged} damaged lines, which are"
        logger.warning("%s has %s dropped", path, lines)


def _row(line: bytes) -> dict[str, Any] | None:
    """None if it is not an object that names its step."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _line(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # a model may call a tool with a number beyond 64 bits, which orjson refuses
        return json.dumps(row, default=lambda value: value.tolist()).encode() + b"\n"


def _rewrite(path: Path, lines: Iterable[bytes]) -> None:
    """Write a new file, then replace the old one: a crash leaves one of the two, complete."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
