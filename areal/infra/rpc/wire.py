"""The byte form of what crosses a process boundary: msgpack, plus numpy arrays and the dataclasses it is told of.

A dataclass travels as a list that begins with a marker no plain value can be, so one pass packs a whole tree and
one pass rebuilds it. Both ends run the same version of this package: fields travel by position, without names.
Refused, with the type's name: any object that is not plain, an array or registered. Nothing is ever pickled here.

Tuples come back as lists, except in fields annotated as tuples. Enums come back in fields annotated as such.
A rebuilt dataclass skips `__post_init__`: its sender has passed it.
"""

# MERGED-DOC
# The wire of a run: every message type of `areal.api`. A type that is to travel is added here.

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse
from areal.api.messages import Episode, GroupResult, GroupTask, Rejection, Row, Stall
from areal.config.rollout import GenerationHyperparameters

ARRAY_CODE = 1
TYPE_CODE = 2
BIG_INT_CODE = 3

ARRAY_MARKER = msgpack.ExtType(ARRAY_CODE, b"")
ARRAY_KINDS = frozenset("biufc")

Restore = Callable[[Any], Any]


class Wire:
    """Packs plain values, numpy arrays and dataclasses of `types`. It keeps no state, so threads may share one."""

    def __init__(self, types: Iterable[type] = (), omit: Mapping[type, Collection[str]] | None = None) -> None:
        """`omit` names fields that stay behind; they come back as their default."""
        shapes = [_Shape(cls, frozenset((omit or {}).get(cls, ()))) for cls in types]
        self._by_type = {shape.cls: shape for shape in shapes}
        self._by_name = {shape.cls.__name__.encode(): shape for shape in shapes}
        if len(self._by_name) < len(self._by_type):
            raise ValueError(f"types on one wire need distinct names, got {[shape.cls.__name__ for shape in shapes]}")

    def pack(self, value: Any) -> bytes:
        # Agents' JSON may hold lone surrogates; a conversation must not fail to travel for one.
        packed: bytes = msgpack.packb(value, default=self._reduce, unicode_errors="surrogatepass")
        return packed

    def unpack(self, data: bytes | memoryview) -> Any:
        return msgpack.unpackb(
            data,
            ext_hook=self._marker,
            list_hook=_rebuild,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )

    def _reduce(self, value: Any) -> Any:
        """What msgpack packs in place of a value that it does not know."""
        shape = self._by_type.get(type(value))
        if shape is not None:
            return [shape.marker, *shape.values(value)]
        if isinstance(value, np.ndarray):
            return _reduce_array(value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, int):  # beyond 64 bits
            return msgpack.ExtType(BIG_INT_CODE, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        raise TypeError(
            f"cannot send {type(value).__qualname__} {value!r:.80} to another process; send plain values, numpy arrays "
            f"or one of {sorted(cls.__name__ for cls in self._by_type)}"
        )

    def _marker(self, code: int, data: bytes) -> Any:
        if code == TYPE_CODE:
            if data in self._by_name:
                return self._by_name[data]
            raise TypeError(f"received a {data.decode()}, which this wire does not know; register it on both ends")
        if code == ARRAY_CODE:
            return _ARRAY
        if code == BIG_INT_CODE:
            return int.from_bytes(data, "big", signed=True)
        raise TypeError(f"received an extension of unknown code {code}; both ends must run the same version")


class _Shape:
    """How one dataclass is taken apart and put together."""

    def __init__(self, cls: type, omitted: frozenset[str]) -> None:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"a wire carries dataclasses, got {cls!r}")
        fields = dataclasses.fields(cls)
        hints = typing.get_type_hints(cls)
        self.cls = cls
        self.marker = msgpack.ExtType(TYPE_CODE, cls.__name__.encode())
        self.names = [field.name for field in fields if field.name not in omitted]
        self.values = _values_of(self.names)
        self._omitted = [(field.name, _default_of(field)) for field in fields if field.name in omitted]
        restorers = [_restorer(hints[name]) for name in self.names]
        self._restorers = [(place, restore) for place, restore in enumerate(restorers) if restore is not None]

    def build(self, values: list[Any]) -> Any:
        if len(values) != len(self.names):
            raise TypeError(
                f"{self.cls.__name__} has the fields {self.names}, received {len(values)} values; "
                "both ends must run the same version"
            )
        for place, restore in self._restorers:
            values[place] = restore(values[place])
        built = object.__new__(self.cls)
        for name, value in zip(self.names, values, strict=True):
            object.__setattr__(built, name, value)  # also right for frozen and slotted classes
        for name, default in self._omitted:
            object.__setattr__(built, name, default())
        return built


class _ArrayShape:
    """Stands where a `_Shape` stands, for arrays: dtype, shape, bytes."""

    def build(self, values: list[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        dtype, shape, data = values
        # A copy, because an array that cannot be written to surprises its owner (torch warns on each one).
        return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


_ARRAY = _ArrayShape()


def _rebuild(items: list[Any]) -> Any:
    if items and isinstance(items[0], (_Shape, _ArrayShape)):
        return items[0].build(items[1:])
    return items


def _reduce_array(array: np.ndarray[Any, np.dtype[Any]]) -> list[Any]:
    if array.dtype.kind not in ARRAY_KINDS:
        raise TypeError(f"arrays on a wire hold numbers or booleans, got dtype {array.dtype}; convert it first")
    return [ARRAY_MARKER, array.dtype.str, array.shape, np.ascontiguousarray(array).data]


def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _default_of(field: "dataclasses.Field[Any]") -> Callable[[], Any]:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    if field.default is not dataclasses.MISSING:
        return lambda: field.default
    raise TypeError(f"field {field.name!r} stays behind when its object is sent, so it needs a default")


def _restorer(hint: Any) -> Restore | None:
    """What turns msgpack's value back into `hint`, or None where it already is one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if hint is tuple or origin is tuple:
        return _restore_tuple
    if origin in (typing.Union, types.UnionType):
        inner = [restore for restore in map(_restorer, args) if restore is not None]
        return partial(_restore_optional, inner[0]) if len(inner) == 1 and type(None) in args else None
    if origin is list and (item := _restorer(args[0])) is not None:
        return partial(_restore_items, item)
    if origin is dict and (_restorer(args[0]) or _restorer(args[1])):
        return partial(_restore_dict, _restorer(args[0]) or _same, _restorer(args[1]) or _same)
    return None


def _same(value: Any) -> Any:
    return value


def _restore_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _restore_optional(restore: Restore, value: Any) -> Any:
    return None if value is None else restore(value)


def _restore_items(restore: Restore, values: list[Any]) -> list[Any]:
    return [restore(value) for value in values]


def _restore_dict(key: Restore, item: Restore, values: dict[Any, Any]) -> dict[Any, Any]:
    return {key(k): item(v) for k, v in values.items()}


MESSAGE_TYPES = (
    EngineHealth,
    Episode,
    GenerationHyperparameters,
    Grammar,
    GroupResult,
    GroupTask,
    ModelRequest,
    ModelResponse,
    Rejection,
    Row,
    Stall,
    WeightUpdate,
)


def api_wire() -> Wire:
    """A wire for all of them; a request leaves its tokenizer at home."""
    return Wire(MESSAGE_TYPES, omit={ModelRequest: ("tokenizer",)})
