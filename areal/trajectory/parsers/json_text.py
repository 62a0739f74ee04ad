"""JSON inside sampled text: where a value that begins here ends, and what it says. Nothing is repaired."""

import json
import re
from typing import Any

_PIECE = re.compile(
    r'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"'  # a string
    r"|[^\"{}\[\]<>|`;\\]++"  # white space, numbers, words, commas: judged by the decoder
    r"|[{}\[\]]"
)
_OPEN_STRING = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+\\?\Z')


def json_end(text: str, at: int) -> int | None:
    """Where the object or array that begins at `at` ends; None if not yet. Raises ValueError if it never can."""
    depth = 0
    while at < len(text):
        piece = _PIECE.match(text, at)
        if piece is None:
            if _OPEN_STRING.match(text, at):
                return None
            raise ValueError("this is no JSON")
        depth += (text[at] in "{[") - (text[at] in "}]")
        at = piece.end()
        if depth == 0:
            return at
    return None


def read_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, and for what could never be sent on as JSON."""
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
        # Lone surrogates and 1e999 can be read but are neither UTF-8 nor JSON when written again.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    return value


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is given twice")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
