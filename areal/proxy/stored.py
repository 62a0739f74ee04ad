"""Answers that clients may ask for again by id, or have forgotten: the latest of a session that were to be stored."""

from dataclasses import replace

from areal.proxy.errors import ApiError
from areal.proxy.types import Call, Reply
from areal.utils.bounded_cache import BoundedCache
from areal.utils.shorten import shown

MAX_STORED = 256
"""Of one session: a client that asks again does so soon."""


class StoredAnswers:
    def __init__(self) -> None:
        self._answers: BoundedCache[str, tuple[Call, Reply]] = BoundedCache(MAX_STORED)
        self.deleted: set[str] = set()
        """No conversation may go on from these. What was sampled stays in the session's tree."""

    def put(self, call: Call, reply: Reply) -> None:
        self._answers.put(reply.id, (replace(call, messages=[]), reply))

    def get(self, answer_id: str) -> tuple[Call, Reply]:
        """Raises ApiError 404."""
        found = self._answers.get(answer_id)
        if found is None:
            raise ApiError(
                404,
                f"no answer of this session with the id {shown(answer_id)} is stored: it was made with store=false, "
                f"was deleted, or is older than the latest {MAX_STORED}",
                param="response_id",
                code="response_not_found",
            )
        return found

    def delete(self, answer_id: str) -> None:
        """Raises ApiError 404."""
        self.get(answer_id)
        self._answers.drop(answer_id)
        self.deleted.add(answer_id)
