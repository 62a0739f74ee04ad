"""Values as bytes, for what crosses a process boundary: msgpack, plus tuples, arrays and registered types.

A dataclass or enum that is to travel is registered. Its values travel as a list that begins with a marker no plain
value can be, so one pass packs a whole tree and one pass rebuilds it. Both ends run the same version of this package:
fields travel by position, without names. A rebuilt dataclass skips `__post_init__`: its sender has passed it.

Arrays travel as type, shape and bytes. So do torch's tensors, which arrive as numpy arrays: a reader needs no torch.

Refused, with the type's name: any object that is not plain, an array or registered. Nothing is ever pickled here, and
bytes from anyone can be unpacked: they become plain values, arrays of numbers and registered types, or an error.

Nothing heavy is imported before a value needs it, because the worker processes of a pool must start fast.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgpack

from areal.utils.shorten import shown

if TYPE_CHECKING:
    import dataclasses

    import numpy as np

FORM_CODE = 1
BIG_INT_CODE = 2
MOST_INT_BYTES = 1785
"""More would be over 4300 digits, which Python refuses to write."""
ARRAY_KINDS = frozenset("biufc")
SHOWN_CHARACTERS = 80
PLAIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: bytes,
    list: list,
    tuple: tuple,
    dict: dict,
}
"""How a value of a subclass is made plain, by the class it comes from."""
TakeApart = Callable[[Any], Iterable[Any]]
"""The values that are sent in place of one."""
Build = Callable[[list[Any]], Any]
"""The value that these make. Raises TypeError or ValueError for those that nothing was taken apart into."""


class Wire:
    """Packs plain values, tuples, arrays and values of `types`. Threads may share one."""

    def __init__(
        self,
        types: Iterable[type] = (),
        omit: Mapping[type, Collection[str]] | None = None,
        forms: "Mapping[type, tuple[TakeApart, Build]] | None" = None,
    ) -> None:
        """`omit` names fields that are not sent; they come back as their default, or as what a mapping makes for them.

        `forms` says of types that do not travel field by field how they do.
        """
        self._registered = list(types)
        self._forms: dict[type, _Form] = {tuple: _TUPLES}
        for cls in self._registered:
            if forms is not None and cls in forms:
                self._forms[cls] = _Form(cls.__name__, *forms[cls])
            elif issubclass(cls, Enum):
                self._forms[cls] = _form_of_enum(cls)
            else:
                self._forms[cls] = _form_of(cls, (omit or {}).get(cls, ()))
        self._by_name = {form.marker.data: form for form in (*self._forms.values(), _ARRAYS)}
        if len(self._by_name) <= len(self._forms):
            names = [cls.__name__ for cls in self._registered]
            raise ValueError(f"types on one wire need distinct names, got {names}")

    def pack(self, value: Any) -> bytes:
        """Raises TypeError for a value that is none of those, ValueError for one that is nested too deeply."""
        # Strict, or msgpack would make lists of tuples and strings of enums.
        # Agents' JSON may hold lone surrogates; a conversation must not fail to travel for one.
        try:
            packed: bytes = msgpack.packb(
                value, default=self._reduce, strict_types=True, unicode_errors="surrogatepass"
            )
        except ValueError as error:
            if not str(error).startswith("recursion"):
                raise
            raise ValueError("cannot send lists in lists over 500 deep to another process; flatten them") from None
        return packed

    def unpack(self, data: bytes | memoryview) -> Any:
        """Raises TypeError or ValueError for bytes that no wire of these types has packed."""
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
        array = _as_array(value)
        if array is not None:
            if type(array) is kind:  # numpy is loaded: from now on its arrays are known at once
                self._forms[kind] = _ARRAYS
            return [_ARRAYS.marker, *_ARRAYS.take_apart(array)]
        if kind is int:  # beyond 64 bits
            return _big_int(value)
        for base, make_plain in PLAIN.items():
            if isinstance(value, base):
                plain, form = make_plain(value), self._forms.get(base)
                return plain if form is None else [form.marker, *form.take_apart(plain)]
        if _is_numpy_scalar(value):
            return value.item()
        others = "" if not self._registered else f" or one of {sorted(cls.__name__ for cls in self._registered)}"
        raise TypeError(
            f"cannot send {kind.__qualname__} {shown(value, SHOWN_CHARACTERS)} to another process; send plain values "
            f"(None, bools, numbers, texts, bytes, lists, tuples, dicts), numpy arrays, torch tensors{others}"
        )

    def _read_extension(self, code: int, data: bytes) -> Any:
        if code == FORM_CODE:
            if data in self._by_name:
                return self._by_name[data]
            name = shown(data.decode(errors="replace"), SHOWN_CHARACTERS).strip("'")
            raise TypeError(f"received a {name}, which this wire does not know; register it on both ends")
        if code == BIG_INT_CODE and len(data) <= MOST_INT_BYTES:
            return int.from_bytes(data, "big", signed=True)
        raise TypeError(f"received an extension of unknown code {code}; both ends must run the same version")


class _Form:
    """How values of one type become a list and are rebuilt from it. Unpacking puts it in the place of its marker."""

    def __init__(self, name: str, take_apart: TakeApart, build: Build) -> None:
        self.marker = msgpack.ExtType(FORM_CODE, name.encode())
        self.build = build
        self.take_apart = take_apart


def _rebuild(items: list[Any]) -> Any:
    if not items or type(items[0]) is not _Form:
        return items
    return items[0].build(items[1:])


def _big_int(value: int) -> "msgpack.ExtType":
    length = value.bit_length() // 8 + 1
    if length > MOST_INT_BYTES:
        raise ValueError(f"an integer may have {MOST_INT_BYTES} bytes to be sent to another process, got {length}")
    return msgpack.ExtType(BIG_INT_CODE, value.to_bytes(length, "big", signed=True))


def _is_numpy_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _as_array(value: Any) -> "np.ndarray[Any, Any] | None":
    """An array or tensor as a plain numpy array; None = it is neither. What exists has its library loaded."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return numpy.asarray(value)  # type: ignore[no-any-return]
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(f"a tensor must be dense to be sent to another process, got {value.layout}; call to_dense()")
    dense = value.detach().cpu().resolve_conj().resolve_neg()
    if dense.is_floating_point() and dense.dtype not in (torch.float16, torch.float32, torch.float64):
        dense = dense.float()  # numpy lacks bfloat16 and smaller ones; float32 holds all of their values
    return dense.numpy()  # type: ignore[no-any-return]


def _array_parts(array: "np.ndarray[Any, Any]") -> tuple[Any, ...]:
    dtype = array.dtype
    if dtype.kind not in ARRAY_KINDS:
        raise TypeError(f"arrays on a wire hold numbers or booleans, got dtype {dtype}; convert it first")
    return dtype.str, array.data if array.flags.c_contiguous else array.copy().data, *array.shape


def _build_array(values: list[Any]) -> "np.ndarray[Any, Any]":
    import numpy as np

    name, data, *shape = values
    if type(name) is not str or not all(type(side) is int and side >= 0 for side in shape):
        raise TypeError(f"received an array of type {shown(name, SHOWN_CHARACTERS)} and shape {shown(shape)}")
    dtype = np.dtype(name)
    if dtype.kind not in ARRAY_KINDS:
        raise TypeError(f"arrays on a wire hold numbers or booleans, received dtype {dtype}")
    # A copy, because an array that cannot be written to surprises its owner (torch warns on each one).
    found = np.frombuffer(data, dtype=dtype).copy()
    return found if shape == [len(found)] else found.reshape(shape)


_TUPLES = _Form("tuple", lambda value: value, tuple)
_ARRAYS = _Form("array", _array_parts, _build_array)


def _form_of_enum(cls: type[Enum]) -> _Form:
    return _Form(cls.__name__, lambda member: (member.value,), lambda values: cls(*values))


def _form_of(cls: type, omitted: Collection[str]) -> _Form:
    import dataclasses

    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"a wire carries dataclasses and enums, got {cls!r}")
    fields = dataclasses.fields(cls)
    names = [field.name for field in fields if field.name not in omitted]
    is_slotted = hasattr(cls, "__slots__")
    made = omitted if isinstance(omitted, Mapping) else {}
    defaults = [(field.name, made.get(field.name) or _default_of(field)) for field in fields if field.name in omitted]

    def build(values: list[Any]) -> Any:
        if len(values) != len(names):
            raise TypeError(
                f"{cls.__name__} has the fields {names}, received {len(values)} values; "
                "both ends must run the same version"
            )
        built = object.__new__(cls)
        if is_slotted:
            for name, value in zip(names, values, strict=True):
                object.__setattr__(built, name, value)  # also right for frozen classes
            for name, default in defaults:
                object.__setattr__(built, name, default())
        else:
            known = built.__dict__
            known.update(zip(names, values, strict=True))
            for name, default in defaults:
                known[name] = default()
        return built

    if len(names) > 1:
        return _Form(cls.__name__, attrgetter(*names), build)
    return _Form(cls.__name__, lambda value: [getattr(value, name) for name in names], build)


def _default_of(field: "dataclasses.Field[Any]") -> Callable[[], Any]:
    import dataclasses

    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    if field.default is not dataclasses.MISSING:
        return lambda: field.default
    raise TypeError(f"field {field.name!r} is not sent, so it needs a default")
