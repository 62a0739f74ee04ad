"""Server-sent events: the frames in which every dialect streams."""

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"

LINE_BREAKS = {"\x85".encode(): rb"\u0085", "\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029"}
"""Legal inside JSON and no line breaks to the standard, but many clients split their lines there."""


def data(value: dict[str, Any]) -> bytes:
    """One line, to whoever reads it: JSON escapes the plain line breaks, and the rest are escaped here."""
    line = orjson.dumps(value)
    for character, escape in LINE_BREAKS.items():
        line = line.replace(character, escape)
    return b"data: " + line + b"\n\n"


def event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\n" + data(value)
