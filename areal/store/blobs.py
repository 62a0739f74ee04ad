"""What the store keeps in compressed form, group by group: rows, conversations, and what the trainer computed.

Rows are kept field by field: what all rows of a group have of one is packed together, and has a checksum of its own
(checks.py). Fields are kept by name, so that a later version of this package reads what an earlier one wrote: a field
that is new gets its default, one that is gone is skipped.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from areal.utils.wire import Wire

T = TypeVar("T")

LEVEL = 1
"""Of compression: higher ones take several times as long and save a tenth."""
SAMPLE = "sample"
"""Beside the fields of a row: the number of its episode within the group."""
_WIRE = Wire()


def pack(value: Any) -> bytes:
    """Plain values, tuples and arrays."""
    return zlib.compress(_WIRE.pack(value), LEVEL)


def unpack(data: bytes) -> Any:
    return _WIRE.unpack(zlib.decompress(data))


def columns_of(episodes: Sequence[Sequence[Any]]) -> dict[str, bytes]:
    """The rows of each episode of a group, field by field. They are dataclasses of one type."""
    rows = [row for episode in episodes for row in episode]
    columns = {SAMPLE: [sample for sample, episode in enumerate(episodes) for _ in episode]}
    fields = {name: _column([vars(row)[name] for row in rows]) for name in (vars(rows[0]) if rows else ())}
    return {name: _WIRE.pack(column) for name, column in (columns | fields).items()}


def episodes_of(columns: Mapping[str, bytes], cls: type[T]) -> dict[int, list[T]]:
    """The rows of each sample that has any."""
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    samples = _WIRE.unpack(columns[SAMPLE])
    fields = {name: _values(_WIRE.unpack(column)) for name, column in columns.items() if name in known}
    episodes: dict[int, list[T]] = {}
    for place, sample in enumerate(samples):
        episodes.setdefault(sample, []).append(cls(**{name: values[place] for name, values in fields.items()}))
    return episodes


def by_name(values: Sequence[Any]) -> list[dict[str, Any]]:
    """The fields of dataclasses of one type."""
    return [dict(vars(value)) for value in values]


def from_names(found: Sequence[dict[str, Any]], cls: type[T]) -> list[T]:
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return [cls(**{name: value for name, value in each.items() if name in known}) for each in found]


def _column(values: list[Any]) -> Any:
    """Lists of numbers that are alike become one, after their lengths; everything else stays as it is."""
    first = values[0]
    if not isinstance(first, np.ndarray) or any(each.ndim != 1 or each.dtype != first.dtype for each in values):
        return values
    return [len(each) for each in values], np.concatenate(values)


def _values(column: Any) -> list[Any]:
    if not isinstance(column, tuple):
        return list(column)
    lengths, joined = column
    ends = np.cumsum([0, *lengths]).tolist()
    return [joined[begin:end].copy() for begin, end in pairwise(ends)]
