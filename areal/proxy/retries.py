"""Which calls of a session are one and the same.

A retry gets the answer of the call it repeats, and no second one is sampled. It is marked by an SDK's retry header
(with the same body) or by an `Idempotency-Key`; unmarked, the same body is a retry only where the answer was recorded
but its client was gone before it had it. The same body sent twice on purpose is two samples.

A client that went away earlier left nothing behind: its generation was aborted. Such a call, and one that failed, stays
on the list as owed, so that its retry is not taken for one of another call that happened to have the same body.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from areal.proxy.errors import ApiError
from areal.proxy.flights import Flight

RETRY_HEADER = "x-stainless-retry-count"
KEY_HEADER = "idempotency-key"


@dataclass(frozen=True)
class Mark:
    """By what a call is known again."""

    digest: bytes
    """Of its body."""
    retry: int
    """0 = the first attempt, or one that does not say."""
    key: str | None


def mark_of(route: str, body: bytes, headers: Mapping[str, str]) -> Mark:
    count = headers.get(RETRY_HEADER, "")
    retry = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0
    digest = blake2b(body, digest_size=16, person=route.encode()[:16]).digest()
    return Mark(digest, retry, headers.get(KEY_HEADER) or None)


@dataclass(eq=False)
class _Known:
    mark: Mark
    retry: int
    """The highest attempt that was given this answer."""
    flight: Flight | None
    """None = it was refused before it began."""

    @property
    def owed(self) -> bool:
        return self.flight is None or self.flight.owed

    @property
    def forgettable(self) -> bool:
        return self.owed or (self.flight is not None and self.flight.reply is not None)

    @property
    def rank(self) -> int:
        """Whose client is the likelier to ask again."""
        assert self.flight is not None or self.owed
        if self.flight is None or self.owed or self.flight.lost:
            return 2
        return 0 if self.flight.reply is not None else 1


class Retries:
    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._known: list[_Known] = []

    def claim(self, mark: Mark, launch: Callable[[], Flight]) -> Flight:
        """The flight that a call joins, or a new one. Raises ApiError 409 where a key comes with another body."""
        known = self._find(mark)
        if known is None:
            self._known.append(_Known(mark, mark.retry, flight := launch()))
            self._forget()
            return flight
        known.retry = max(known.retry, mark.retry)
        if known.owed or known.flight is None:
            known.flight = launch()
        return known.flight

    def refuse(self, mark: Mark) -> None:
        """A first attempt was turned away and will be made again."""
        if mark.retry == 0 and mark.key is None:
            self._known.append(_Known(mark, 0, None))
            self._forget()

    def _find(self, mark: Mark) -> _Known | None:
        if mark.key is not None:
            return self._keyed(mark)
        same = [known for known in reversed(self._known) if known.mark.digest == mark.digest and not known.mark.key]
        if mark.retry == 0:
            return next((known for known in same if known.rank == 2), None)
        fresh = [known for known in same if known.retry < mark.retry]
        return max(fresh or same, key=lambda known: known.rank, default=None)  # of equals, the newest

    def _keyed(self, mark: Mark) -> _Known | None:
        known = next((known for known in self._known if known.mark.key == mark.key), None)
        if known is not None and known.mark.digest != mark.digest:
            raise ApiError(
                409,
                f"Idempotency-Key {mark.key!r:.100} was used with another body; use a new key for a new request",
                code="idempotency_key_reused",
            )
        return known

    def _forget(self) -> None:
        """The oldest, but none that is on its way."""
        excess = len(self._known) - self._remembered
        if excess > 0:
            old = [known for known in self._known if known.forgettable][:excess]
            self._known = [known for known in self._known if known not in old]
