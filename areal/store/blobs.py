"""What the store keeps in compressed form: an episode's rows, its tree, and what the trainer computed for its tokens.

Fields are kept by name, so that a later version of this package reads what an earlier one wrote: a field that is new
gets its default, one that is gone is skipped.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

from areal.utils.wire import Wire

T = TypeVar("T")

LEVEL = 1
"""Of compression: higher ones take several times as long and save a tenth."""
_WIRE = Wire()


def pack(value: Any) -> bytes:
    """Plain values, tuples and arrays."""
    return zlib.compress(packed(value), LEVEL)


def packed(value: Any) -> bytes:
    """The same before it is compressed."""
    return _WIRE.pack(value)


def unpack(data: bytes) -> Any:
    return _WIRE.unpack(zlib.decompress(data))


def pack_all(values: Sequence[Any]) -> bytes:
    """Dataclasses of one type whose fields are plain values and arrays."""
    return pack(by_name(values))


def unpack_all(data: bytes, cls: type[T]) -> list[T]:
    return from_names(unpack(data), cls)


def by_name(values: Sequence[Any]) -> list[dict[str, Any]]:
    """The fields of dataclasses of one type."""
    return [dict(vars(value)) for value in values]


def from_names(found: Sequence[dict[str, Any]], cls: type[T]) -> list[T]:
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return [cls(**{name: value for name, value in each.items() if name in known}) for each in found]
