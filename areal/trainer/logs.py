"""What a run writes for others to read, a JSON object per line, from its store:

- `MetricsLog`: the figures of each step, in RUN/metrics.jsonl, for TensorBoard in RUN/tensorboard/, for /metrics and
  for trackers (trackers.py).
- `RolloutLog`: every episode that was trained on, in RUN/rollouts.jsonl.

They are written as the run goes, after the store. When a run is opened, they are made to agree with it: what a killed
process did not come to write is added, and steps that were taken back are dropped. What cannot be written, on a full
disk, is written later. So each step is in each of them once.
"""

import heapq
import json
import math
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from areal.api.messages import Episode
from areal.store.reader import StoreReader, rollout_line
from areal.utils.closing import Closing
from areal.utils.logging import getLogger

if TYPE_CHECKING:  # it loads what answers HTTP requests, which few runs need
    from areal.trainer.exporter import Exporter
    from areal.trainer.trackers import Trackers

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
BOARD_DIRECTORY = "tensorboard"
NOT_IN_TAGS = re.compile(r"[^-/\w.]")
"""What TensorBoard's own writers replace in the name of a curve."""

logger = getLogger("trainer")


class MetricsLog(Closing):
    def __init__(
        self,
        run_dir: str | Path,
        last_step: int = 0,
        exporter: "Exporter | None" = None,
        *,
        board_from: int = 0,
        trackers: "Trackers | None" = None,
    ) -> None:
        """Steps up to `last_step` have been taken.

        TensorBoard gets those from `board_from` on again: what it was given before, a kill cannot have lost.
        """
        self._lines = _StepLines(
            Path(run_dir), METRICS_FILE, StoreReader.metrics_per_step, StoreReader.metrics, last_step
        )
        # An extra of the package: whoever does not look at TensorBoard need not have it.
        self._board = _Board(Path(run_dir), board_from, last_step) if find_spec("tensorboardX") else None
        self._exporter = exporter
        self._trackers = trackers
        if trackers is not None:
            trackers.catch_up(last_step)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a row, which the store has."""
        self._lines.append([{"step": step, **finite(values)}])
        if self._board is not None:
            self._board.write(step, values)
        if self._exporter is not None:
            self._exporter.step(step, values)
        if self._trackers is not None:
            self._trackers.figures(step, finite(values))

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows written so far, oldest first; none if the run has not begun."""
    path = Path(run_dir) / METRICS_FILE
    return list(read_lines(path)) if path.exists() else []


def finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Without `step`. A value that is not finite becomes None: JSON cannot express it."""
    return {name: _finite(value) for name, value in values.items() if name != "step"}


def _finite(value: float | None) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


class RolloutLog(Closing):
    def __init__(self, run_dir: str | Path, last_step: int = 0) -> None:
        """`last_step` is as in `MetricsLog`."""
        self._lines = _StepLines(
            Path(run_dir), ROLLOUTS_FILE, StoreReader.episodes_per_step, StoreReader.rollouts, last_step
        )

    def write(self, step: int, episodes: Iterable[tuple[int, Episode]]) -> None:
        """The episodes of a step, each with its task's id, which the store has."""
        self._lines.append([rollout_line(step, task_id, episode) for task_id, episode in episodes])

    def close(self) -> None:
        self._lines.close()


class _StepLines:
    """A file of lines that name their step; every line reaches the operating system before `append` returns."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        counted: Callable[[StoreReader], Mapping[int, int]],
        rows_of: Callable[[StoreReader, int], Iterable[dict[str, Any]]],
        last_step: int,
    ) -> None:
        """The store has so many rows of each step (`counted`), and these (`rows_of`)."""
        self._run_dir = run_dir
        self._path = run_dir / name
        self._counted = counted
        self._rows_of = rows_of
        self._file: BinaryIO | None = None
        """None = it is behind."""
        self._said = False
        self._catch_up(last_step)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Rows of one step. If that is not possible, it is done later: the store has them."""
        if self._file is None:
            self._catch_up(rows[-1]["step"])
            return
        try:
            _write(self._file, b"".join(map(_line, rows)))
        except OSError as error:
            self._fall_behind(error)

    def close(self) -> None:
        _close(self._file)

    def _catch_up(self, last_step: int) -> None:
        try:
            with StoreReader(self._run_dir) as store:
                _agree(self._path, self._counted(store), lambda step: self._rows_of(store, step), last_step)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            self._fall_behind(error)

    def _fall_behind(self, error: OSError) -> None:
        self.close()
        self._file = None
        if not self._said:
            logger.warning("%s cannot be written (%s); it is brought up to date later", self._path, error.strerror)
        self._said = True


class _Board:
    """The events that TensorBoard reads."""

    def __init__(self, run_dir: Path, first_step: int, last_step: int) -> None:
        """What is there of `first_step` and later ones is replaced by what the store has of them."""
        self._run_dir = run_dir
        self._directory = run_dir / BOARD_DIRECTORY
        self._file: BinaryIO | None = None
        """None = it is behind."""
        self._first_missing = first_step
        self._said = False
        if first_step == 0:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._catch_up(last_step)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._file is None:
            self._catch_up(step)
            return
        try:
            self._add(step, values)
        except OSError as error:
            self._fall_behind(step, error)

    def close(self) -> None:
        _close(self._file)

    def _catch_up(self, last_step: int) -> None:
        first = self._first_missing
        try:
            self._open(first)
            with StoreReader(self._run_dir) as store:
                for row in store.metrics(first_step=first):
                    if row["step"] <= last_step:
                        self._add(row["step"], row)
        except OSError as error:
            self._fall_behind(first, error)

    def _fall_behind(self, step: int, error: OSError) -> None:
        self.close()
        self._file, self._first_missing = None, step
        if not self._said:
            logger.warning("%s cannot be written (%s); it is brought up to date later", self._directory, error.strerror)
        self._said = True

    def _open(self, first_step: int) -> None:
        # Imported here because it takes a tenth of a second and only a run that is being trained needs it.
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._directory.mkdir(parents=True, exist_ok=True)
        # Files are read in the order of their names, which begin with the second.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{time.monotonic_ns():020d}"
        self._file = (self._directory / name).open("ab", buffering=0)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step > 0:
            start = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=time.time(), step=first_step, session_log=start))

    def _add(self, step: int, values: Mapping[str, float | None]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        curves = [
            Summary.Value(tag=NOT_IN_TAGS.sub("_", name).lstrip("/"), simple_value=value)
            for name, value in finite(values).items()
            if value is not None
        ]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=curves)))

    def _append(self, event: Any) -> None:
        """A record as TensorBoard reads it. tensorboardX's own writer would wait in each step until the disk has it."""
        from tensorboardX.record_writer import masked_crc32c

        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
        assert self._file is not None, "it was opened"
        _write(self._file, b"".join((length, checks[0], content, checks[1])))


def _write(file: BinaryIO, content: bytes) -> None:
    """The operating system has all of it when this returns; a file that is not buffered may take a part at a time."""
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


def _close(file: BinaryIO | None) -> None:
    """A file system of the network may say only now that it had no room; the store has what is missing."""
    if file is not None:
        with suppress(OSError):
            file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that can be read."""
    return (row for _, _, row in _whole_lines(path))


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Where each line begins, the line and its row.

    Left out are an incomplete last line, which a killed process may leave, and damaged ones.
    """
    damaged = at = 0
    with path.open("rb") as file:
        for line in file:
            begin, at = at, at + len(line)
            if not line.endswith(b"\n"):
                continue
            row = _row(line)
            if row is None:
                damaged += 1
            else:
                yield begin, line, row
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


@dataclass
class _Stretch:
    """Lines of one step that follow each other in a file."""

    step: int
    begin: int
    end: int
    lines: int


def _agree(
    path: Path, stored: Mapping[int, int], rows_of: Callable[[int], Iterable[dict[str, Any]]], last_step: int
) -> None:
    """Make a file have each step up to `last_step` once and whole.

    `stored`: how many rows the store has of each step; steps that it does not know, from before there was one, stay as
    they are. Usually the file has the first so many steps, and the others are added at its end.
    """
    stretches = _stretches(path) if path.exists() else []
    good = [each for each in stretches if each.step <= last_step and stored.get(each.step, each.lines) == each.lines]
    end = count = 0
    for each in good:
        if each.begin != end or (count and each.step <= good[count - 1].step):
            break
        end, count = each.end, count + 1
    known = {each.step for each in good}
    missing = [step for step in sorted(stored) if step not in known and step <= last_step]
    added = ((step, _line(row)) for step in missing for row in rows_of(step))
    if count == len(good) and (not good or not missing or good[-1].step < missing[0]):
        with path.open("ab") as file:
            file.truncate(end)
            file.writelines(line for _, line in added)
        return
    with path.open("rb") as old:
        kept = ((each.step, _bytes(old, each)) for each in sorted(good, key=lambda each: each.step))
        _rewrite(path, (lines for _, lines in heapq.merge(kept, added, key=lambda each: each[0])))


def _stretches(path: Path) -> list[_Stretch]:
    found: list[_Stretch] = []
    for begin, line, row in _whole_lines(path):
        if not found or found[-1].step != row["step"] or found[-1].end != begin:
            found.append(_Stretch(row["step"], begin, begin, 0))
        found[-1].end += len(line)
        found[-1].lines += 1
    return found


def _bytes(file: BinaryIO, stretch: _Stretch) -> bytes:
    file.seek(stretch.begin)
    return file.read(stretch.end - stretch.begin)


def _rewrite(path: Path, lines: Iterable[bytes]) -> None:
    """Write a new file, then replace the old one: a crash leaves one of the two, complete."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
