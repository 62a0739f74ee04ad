"""The conversation that a call stands for: what it sends, behind what it continues."""

from areal.proxy.errors import bad_request
from areal.proxy.exchange import Call
from areal.proxy.sessions import Session
from areal.trajectory.meaning import Message


def conversation(session: Session, call: Call) -> list[Message]:
    """Raises ApiError 400 where it continues an answer that this session never gave."""
    system: list[Message] = []
    if call.instructions is not None:
        system = [{"role": "system", "content": call.instructions}]
    past = [] if call.continues is None else _past(session, call.continues)
    return [*system, *past, *call.messages]


def _past(session: Session, response_id: str) -> list[Message]:
    completion = session.tree.by_id(response_id)
    if completion is None:
        raise bad_request(
            f"previous_response_id must be the id of an answer of this session, got {response_id!r}",
            "previous_response_id",
            "previous_response_not_found",
        )
    messages = session.tree.conversation(completion)
    return messages[1:] if response_id in session.instructed else messages
