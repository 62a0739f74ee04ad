"""A context variable that has a value inside a block: what `contextlib.contextmanager` makes, for half of its time.

Every episode enters several of these.
"""

from contextvars import ContextVar, Token
from typing import Generic, TypeVar

T = TypeVar("T")


class Assigned(Generic[T]):
    """`with Assigned(variable, value) as value:`; each is entered once."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T | None], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> T:
        self._token: Token[T | None] = self._variable.set(self._value)
        return self._value

    def __exit__(self, *exc_info: object) -> None:
        self._variable.reset(self._token)
