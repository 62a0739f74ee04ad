"""Values as bytes, for what crosses a process boundary: msgpack, plus tuples, numpy arrays and registered types.

A dataclass or enum that is to travel is registered. Its values travel as a list that begins with a marker no plain
value can be, so one pass packs a whole tree and one pass rebuilds it. Both ends run the same version of this package:
fields travel by position, without names. A rebuilt dataclass skips `__post_init__`: its sender has passed it.

Refused, with the type's name: any object that is not plain, an array or registered. Nothing is ever pickled here.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import RejectReason
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse
from areal.api.messages import Array, Episode, GroupResult, GroupTask, Rejection, Row, Stall
from areal.config.rollout import GenerationHyperparameters

MESSAGE_TYPES = (
    EngineHealth,
    Episode,
    GenerationHyperparameters,
    Grammar,
    GroupResult,
    GroupTask,
    ModelRequest,
    ModelResponse,
    RejectReason,
    Rejection,
    Row,
    Stall,
    WeightUpdate,
)
"""Every type that travels between the processes of a run as itself; a `WorkerSetup` and user objects travel as bytes,
which their sender has pickled."""

FORM_CODE = 1
BIG_INT_CODE = 2
ARRAY_KINDS = frozenset("biufc")
PLAIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: bytes,
    list: list,
    tuple: tuple,
    dict: dict,
    np.ndarray: np.asarray,
    np.generic: np.generic.item,
}
"""How a value of a subclass is made plain, by the class it comes from."""


def api_wire() -> "Wire":
    """A wire for the messages of a run; a request travels without its tokenizer."""
    return Wire(MESSAGE_TYPES, omit={ModelRequest: ("tokenizer",)})


class Wire:
    """Packs plain values, tuples, arrays and values of `types`. It keeps no state, so threads may share one."""

    def __init__(self, types: Iterable[type] = (), omit: Mapping[type, Collection[str]] | None = None) -> None:
        """`omit` names fields that are not sent; they come back as their default."""
        self._registered = list(types)
        self._forms: dict[type, _Form] = {tuple: _form_of_tuples(), np.ndarray: _form_of_arrays()}
        for cls in self._registered:
            self._forms[cls] = _form_of_enum(cls) if issubclass(cls, Enum) else _form_of(cls, (omit or {}).get(cls, ()))
        self._by_name = {form.marker.data: form for form in self._forms.values()}
        if len(self._by_name) < len(self._forms):
            names = [cls.__name__ for cls in self._registered]
            raise ValueError(f"types on one wire need distinct names, got {names}")

    def pack(self, value: Any) -> bytes:
        # Strict, or msgpack would make lists of tuples and strings of enums.
        # Agents' JSON may hold lone surrogates; a conversation must not fail to travel for one.
        packed: bytes = msgpack.packb(value, default=self._reduce, strict_types=True, unicode_errors="surrogatepass")
        return packed

    def unpack(self, data: bytes | memoryview) -> Any:
        return msgpack.unpackb(
            data,
            ext_hook=self._read_extension,
            list_hook=_rebuild,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )

    def _reduce(self, value: Any) -> Any:
        """What msgpack packs in place of a value that it does not know."""
        kind = type(value)
        form = self._forms.get(kind)
        if form is not None:
            return [form.marker, *form.take_apart(value)]
        if kind is int:  # beyond 64 bits
            return msgpack.ExtType(BIG_INT_CODE, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        for base, make_plain in PLAIN.items():
            if isinstance(value, base):
                plain, form = make_plain(value), self._forms.get(base)
                return plain if form is None else [form.marker, *form.take_apart(plain)]
        raise TypeError(
            f"cannot send {kind.__qualname__} {value!r:.80} to another process; send plain values, numpy arrays "
            f"or one of {sorted(cls.__name__ for cls in self._registered)}"
        )

    def _read_extension(self, code: int, data: bytes) -> Any:
        if code == FORM_CODE:
            if data in self._by_name:
                return self._by_name[data]
            raise TypeError(f"received a {data.decode()}, which this wire does not know; register it on both ends")
        if code == BIG_INT_CODE:
            return int.from_bytes(data, "big", signed=True)
        raise TypeError(f"received an extension of unknown code {code}; both ends must run the same version")


class _Form:
    """How values of one type become a list and are rebuilt from it. Unpacking puts it in the place of its marker."""

    def __init__(
        self, name: str, take_apart: Callable[[Any], Iterable[Any]], build: Callable[[list[Any]], Any]
    ) -> None:
        self.marker = msgpack.ExtType(FORM_CODE, name.encode())
        self.build = build
        self.take_apart = take_apart


def _rebuild(items: list[Any]) -> Any:
    if items and type(items[0]) is _Form:
        return items[0].build(items[1:])
    return items


def _form_of_tuples() -> _Form:
    return _Form("tuple", lambda value: value, tuple)


def _form_of_arrays() -> _Form:
    def take_apart(array: Array) -> tuple[Any, ...]:
        if array.dtype.kind not in ARRAY_KINDS:
            raise TypeError(f"arrays on a wire hold numbers or booleans, got dtype {array.dtype}; convert it first")
        return array.dtype.str, np.ascontiguousarray(array).data, *array.shape

    def build(values: list[Any]) -> Array:
        dtype, data, *shape = values
        # A copy, because an array that cannot be written to surprises its owner (torch warns on each one).
        return np.frombuffer(data, dtype=dtype).reshape(shape).copy()

    return _Form("array", take_apart, build)


def _form_of_enum(cls: type[Enum]) -> _Form:
    return _Form(cls.__name__, lambda member: (member.value,), lambda values: cls(*values))


def _form_of(cls: type, omitted: Collection[str]) -> _Form:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"a wire carries dataclasses and enums, got {cls!r}")
    fields = dataclasses.fields(cls)
    names = [field.name for field in fields if field.name not in omitted]
    defaults = [(field.name, _default_of(field)) for field in fields if field.name in omitted]

    def build(values: list[Any]) -> Any:
        if len(values) != len(names):
            raise TypeError(
                f"{cls.__name__} has the fields {names}, received {len(values)} values; "
                "both ends must run the same version"
            )
        built = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(built, name, value)  # also right for frozen and slotted classes
        for name, default in defaults:
            object.__setattr__(built, name, default())
        return built

    if len(names) > 1:
        return _Form(cls.__name__, attrgetter(*names), build)
    return _Form(cls.__name__, lambda value: [getattr(value, name) for name in names], build)


def _default_of(field: "dataclasses.Field[Any]") -> Callable[[], Any]:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    if field.default is not dataclasses.MISSING:
        return lambda: field.default
    raise TypeError(f"field {field.name!r} is not sent, so it needs a default")
