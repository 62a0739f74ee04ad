"""The wire formats that agents speak, one file each, all with the functions of `Dialect`."""

from areal.proxy.dialects import anthropic, chat, responses
from areal.proxy.dialects.base import Dialect

DIALECTS: dict[str, Dialect] = {
    "/chat/completions": chat,
    "/responses": responses,
    "/messages": anthropic,
}
"""By route. A new dialect is a new file and a line here."""
