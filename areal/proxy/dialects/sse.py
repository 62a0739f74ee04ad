"""Server-sent events: the frames in which every dialect streams."""

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


def data(value: dict[str, Any]) -> bytes:
    """JSON has no raw line breaks, so one line holds it."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\n" + data(value)
