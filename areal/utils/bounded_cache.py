"""A dictionary that forgets what was used least recently once it holds too much."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Holds values of a total size of at most `limit`; every value counts as 1 unless `size` says otherwise.

    One value larger than the limit is still held, alone; a limit of 0 holds nothing. Not locked: a cache that threads
    share is guarded by its owner.
    """

    def __init__(self, limit: int, size: Callable[[V], int] = lambda value: 1) -> None:
        self._limit = limit
        self._size = size
        self._held: OrderedDict[K, V] = OrderedDict()
        self._total = 0

    def get(self, key: K) -> V | None:
        """The value, which now counts as the one used last; None if it is not held."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: K, value: V) -> None:
        self.drop(key)
        self._held[key] = value
        self._total += self._size(value)
        while self._total > self._limit and len(self._held) > min(1, self._limit):
            self._total -= self._size(self._held.popitem(last=False)[1])

    def drop(self, key: K) -> None:
        """Forget a key, whether or not it is held."""
        if key in self._held:
            self._total -= self._size(self._held.pop(key))

    def clear(self) -> None:
        self._held.clear()
        self._total = 0

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)
