"""How many tokens the calls of one session may take. What a running call may still take is set aside for it."""

from collections.abc import Iterator
from contextlib import contextmanager

from areal.proxy.errors import ApiError


class Budget:
    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._taken = 0

    @contextmanager
    def reserved(self, most: int) -> Iterator[list[int]]:
        """Raises ApiError 429 where that many might be too many; put what was really taken into the list."""
        if self._limit is not None and self._taken + most > self._limit:
            raise _spent(self._limit, self._limit - self._taken, most)
        taken: list[int] = []
        self._taken += most
        try:
            yield taken
        finally:
            self._taken += sum(taken) - most


def _spent(limit: int, left: int, asked: int) -> ApiError:
    return ApiError(
        429,
        f"a session may take {limit} tokens, prompts and answers counted (proxy.limits.max_tokens_per_session); "
        f"{left} are left and this call may take {asked}",
        kind="rate_limit_error",
        code="token_limit_exceeded",
    )
