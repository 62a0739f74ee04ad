"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A block that is not exactly that stays text: the agent sees what the model said, and nothing is repaired into a call.
"""

import json
import re
from typing import Any

CALL_END = "</tool_call>"

_BEGIN = re.compile(r"<tool_call>\s*")
_END = re.compile(r"\s*</tool_call>")


def parse(text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """The text around the calls, and each call's name and arguments, in the order they were written."""
    calls: list[tuple[str, dict[str, Any]]] = []
    around: list[str] = []
    end = 0
    for begin in _BEGIN.finditer(text):
        call = _call(text, begin.end()) if begin.start() >= end else None
        if call is not None:
            around.append(text[end : begin.start()])
            name, arguments, end = call
            calls.append((name, arguments))
    if not calls:
        return text, []
    # Whitespace beside a call belongs to the format: templates write it again themselves.
    pieces = [piece.strip() for piece in (*around, text[end:])]
    return "\n".join(piece for piece in pieces if piece), calls


def _call(text: str, at: int) -> tuple[str, dict[str, Any], int] | None:
    """The call whose JSON begins at `at`, and where its block ends."""
    try:
        call, behind = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text, at)
        # What JSON text allows but UTF-8 or JSON output does not (lone surrogates, 1e999) could never be sent.
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    end = _END.match(text, behind)
    if end is None or not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return None
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, arguments, end.end()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
