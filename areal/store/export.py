"""Writes a run store to files that other programs read: `episodes` and `metrics`, as JSON lines or as Parquet.

A line of episodes.jsonl has everything that a line of rollouts.jsonl has, and tokens: `rows`, each with arrays of one
length, the trainer's advantages and log-probs among them, null where it computed nothing. Parquet has the same columns
with NaN for null in arrays; `messages`, `stats` and `nodes` are JSON there.

Episodes are read a few at a time, so that memory stays small and a run that goes on is not held up. A file gets its
name when it is complete.
"""

import base64
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from areal.api.messages import Array, Episode, Row, TrainedRow
from areal.store.filters import EpisodeFilter
from areal.store.reader import rollout_line
from areal.store.schema import StoreError
from areal.store.search import ALL, EpisodeLine, StoreSearch
from areal.utils.installing import missing

Record = dict[str, Any]
Steps = tuple[float | None, float | None]

FORMATS = ("jsonl", "parquet")
EVERY_STEP: Steps = (None, None)
READ_AT_ONCE = 100
ROW_GROUP_EPISODES, ROW_GROUP_TOKENS = 1000, 2_000_000
"""What Parquet holds in memory before it is written."""
JSON_IN_PARQUET = ("messages", "stats", "nodes")
COLUMNS = ("id", "sample", "state", "reason", "staleness", "prompt_tokens", "truncated")
"""What a line has besides those of rollouts.jsonl."""


@dataclasses.dataclass(frozen=True)
class Exported:
    path: Path
    rows: int


def export(
    store: StoreSearch,
    directory: Path,
    format: str,
    *,
    chosen: EpisodeFilter = ALL,
    steps: Steps = EVERY_STEP,
    force: bool = False,
) -> list[Exported]:
    """Both files. `steps` is of both, from and to; those of episodes are part of `chosen` already.

    Raises StoreError if a file exists and `force` is not given, or if Parquet cannot be written here.
    """
    write_episodes, write_metrics = (_write_lines, _write_lines) if format == "jsonl" else _parquet_writers()
    targets = [directory / f"episodes.{format}", directory / f"metrics.{format}"]
    for path in targets:
        if path.exists() and not force:
            raise StoreError(f"an export writes new files, but {path} exists; choose another --out or add --force")
    episodes, metrics = targets
    with _complete(episodes) as file:
        written = write_episodes(file, episode_records(store, chosen))
    with _complete(metrics) as file:
        lines = write_metrics(file, _metrics_of(store, steps))
    return [Exported(episodes, written), Exported(metrics, lines)]


def episode_records(store: StoreSearch, chosen: EpisodeFilter = ALL) -> Iterator[Record]:
    """In the order of steps; what was not trained or rejected yet comes last."""
    place, more = None, True
    while more:
        page = store.page(chosen, "step", place, READ_AT_ONCE)
        for task_id, lines in groupby(page.episodes, key=attrgetter("task_id")):
            episodes, trained = store.episodes(task_id), store.trained(task_id)
            for line in lines:
                if line.id in episodes:  # else its group was tried again since the page was read
                    yield episode_record(line, episodes[line.id], trained.get(line.id, []))
        place, more = page.next, page.next is not None


def episode_record(line: EpisodeLine, episode: Episode, trained: list[TrainedRow]) -> Record:
    computed: list[TrainedRow | None] = [*trained] or [None] * len(episode.rows)
    columns = dataclasses.asdict(line)
    return {
        **{name: columns[name] for name in COLUMNS},
        **rollout_line(line.step, line.task_id, episode),
        "version_min": line.oldest_version,  # these three also without tokens
        "version_max": line.newest_version,
        "tokens": line.tokens,
        "stats": episode.stats,
        "nodes": [dataclasses.asdict(node) for node in episode.nodes],
        "rows": [_row_record(row, each) for row, each in zip(episode.rows, computed, strict=True)],
    }


def _row_record(row: Row, trained: TrainedRow | None) -> Record:
    record = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    record["choices"] = [dataclasses.asdict(each) for each in row.choices]
    record["advantages"] = None if trained is None else _on_row(row, trained.advantages)
    record["trainer_logprobs"] = None if trained is None else _on_row(row, trained.logprobs)
    record["entropies"] = None if trained is None else _on_row(row, trained.entropies)
    return record


def _on_row(row: Row, values: Array) -> Array:
    """What was computed for the trained tokens, at their places."""
    whole = np.full(len(row.input_ids), np.nan, np.float32)
    if len(values):
        whole[row.loss_mask] = values
    return whole


def _metrics_of(store: StoreSearch, steps: Steps) -> Iterator[Record]:
    first, last = steps
    for line in store.metrics():
        if (first is None or line["step"] >= first) and (last is None or line["step"] <= last):
            yield line


@contextmanager
def _complete(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name at the end, and none if there was an error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; choose another --out") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def _write_lines(file: IO[bytes], records: Iterable[Record]) -> int:
    count = 0
    for count, record in enumerate(records, 1):  # noqa: B007
        file.write(_json(record) + b"\n")
    return count


def _json(value: Any) -> bytes:
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, default=_plain, option=options)
    except TypeError:  # a number beyond 64 bits, or half of a surrogate pair, which models may write
        return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):  # an image
        return base64.b64encode(value).decode()
    return [None if each != each else each for each in value.tolist()]


def _parquet_writers() -> tuple[Callable[..., int], Callable[..., int]]:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise StoreError(missing("--format parquet needs pyarrow", error, "datasets")) from error

    def write_episodes(file: IO[bytes], records: Iterable[Record]) -> int:
        schema, count = _episode_schema(arrow), 0
        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for part in _row_groups(records):
                writer.write_table(arrow.Table.from_pylist([_parquet_record(each) for each in part], schema))
                count += len(part)
        return count

    def write_metrics(file: IO[bytes], lines: Iterable[Record]) -> int:
        rows = list(lines)  # one for each step; the columns of the file are not known before the last
        names = sorted({name for line in rows for name in line} - {"step"})
        schema = arrow.schema([("step", arrow.int64()), *((name, arrow.float64()) for name in names)])
        parquet.write_table(arrow.Table.from_pylist(rows, schema), file, compression="zstd")
        return len(rows)

    return write_episodes, write_metrics


def _row_groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    part: list[Record] = []
    tokens = 0
    for record in records:
        part.append(record)
        tokens += sum(len(row["input_ids"]) for row in record["rows"])
        if len(part) >= ROW_GROUP_EPISODES or tokens >= ROW_GROUP_TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _parquet_record(record: Record) -> Record:
    turns = [{"asked": asked, "answered": answered, "tokens": tokens} for asked, answered, tokens in record["turns"]]
    as_json = {name: _json(record[name]).decode() for name in JSON_IN_PARQUET}
    return {**record, **as_json, "turns": turns}


def _choices_fields(arrow: Any) -> Mapping[str, Any]:
    whole, text, ids = arrow.int64(), arrow.string(), arrow.list_(arrow.int32())
    return {
        "begin": whole,
        "end": whole,
        "greedy": arrow.bool_(),
        "grammar_kind": text,
        "grammar_text": text,
        "stops": ids,
        "min_new_tokens": whole,
        "sizes": ids,
        "ids": ids,
        "unreported": text,
    }


def _episode_schema(arrow: Any) -> Any:
    whole, number, text = arrow.int64(), arrow.float64(), arrow.string()
    ids, numbers = arrow.list_(arrow.int32()), arrow.list_(arrow.float32())
    row: Mapping[str, Any] = {
        "input_ids": ids,
        "loss_mask": arrow.list_(arrow.bool_()),
        "logprobs": numbers,
        "versions": ids,
        "returns": numbers,
        "completion_index": ids,
        "temperatures": numbers,
        "reward": number,
        "recompute_logprobs": arrow.bool_(),
        "truncated": arrow.bool_(),
        "images": arrow.list_(arrow.binary()),
        "group_id": whole,
        "truncated_completions": arrow.list_(whole),
        "choices": arrow.list_(arrow.struct(_choices_fields(arrow))),
        "advantages": numbers,
        "trainer_logprobs": numbers,
        "entropies": numbers,
    }
    turn = arrow.struct({"asked": number, "answered": number, "tokens": whole})
    return arrow.schema(
        {
            "id": whole,
            "step": whole,
            "task_id": whole,
            "sample": whole,
            "state": text,
            "reason": text,
            "reward": number,
            "messages": text,
            "version_min": whole,
            "version_max": whole,
            "staleness": whole,
            "tokens": whole,
            "prompt_tokens": whole,
            "truncated": arrow.bool_(),
            "calls": whole,
            "seconds": number,
            "turns": arrow.list_(turn),
            "stats": text,
            "nodes": text,
            "rows": arrow.list_(arrow.struct(row)),
        }
    )
