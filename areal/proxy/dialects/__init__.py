"""The wire formats that agents speak, one file each, all with the functions of `Dialect`."""

from collections.abc import Iterable

from areal.proxy.dialects import anthropic, chat, completions, responses
from areal.proxy.dialects.base import Dialect

DIALECTS: dict[str, Dialect] = {
    "/chat/completions": chat,
    "/completions": completions,
    "/responses": responses,
    "/messages": anthropic,
}
"""By route. A new dialect is a new file and a line here."""


def dialect_of_request(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Dialect:
    """Whose errors the client of a request understands: by what it says of itself, or by the route."""
    ours = any(name == b"anthropic-version" for name, _ in headers) or "/messages" in path
    return anthropic if ours else chat
