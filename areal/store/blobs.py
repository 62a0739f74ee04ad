"""What the store keeps in compressed form, group by group: rows, conversations, and what the trainer computed.

Rows are kept field by field: what all rows of a group have of one is packed together, and has a checksum of its own
(checks.py). Fields are kept by name, so that a later version of this package reads what an earlier one wrote: a field
that is new gets its default, one that is gone is skipped. What tokens were drawn from is kept where it was limited, in
the same way; of groups in which it was not, nothing is.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from areal.api.io_struct import Choices
from areal.utils.columns import join, split
from areal.utils.wire import Wire

T = TypeVar("T")

LEVEL = 1
"""Of compression: higher ones take several times as long and save a tenth."""
SAMPLE = "sample"
"""Beside the fields of a row: the number of its episode within the group."""
CHOICES = "choices"
"""The field of a row whose values are dataclasses."""
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
    names = [field.name for field in dataclasses.fields(rows[0])] if rows else []
    values = zip(*map(attrgetter(*names), rows), strict=True) if rows else ()
    fields = {name: join(list(each)) for name, each in zip(names, values, strict=True)}
    chosen = fields.pop(CHOICES, ())
    if any(chosen):
        fields[CHOICES] = [by_name(each) for each in chosen]
    return {name: _WIRE.pack(column) for name, column in (columns | fields).items()}


def episodes_of(columns: Mapping[str, bytes], cls: type[T]) -> dict[int, list[T]]:
    """The rows of each sample that has any."""
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    samples = _WIRE.unpack(columns[SAMPLE])
    fields = {name: split(_WIRE.unpack(column)) for name, column in columns.items() if name in known}
    if CHOICES in fields:
        fields[CHOICES] = [from_names(each, Choices) for each in fields[CHOICES]]
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
