"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A block that is not exactly that stays text: the agent sees what the model said, and nothing is repaired into a call.
"""

import json
import re
from typing import Any

CALL_END = "</tool_call>"

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse(text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """The text around the calls, and each call's name and arguments, in the order they were written."""
    calls: list[tuple[str, dict[str, Any]]] = []
    around: list[str] = []
    end = 0
    for block in _BLOCK.finditer(text):
        call = _call(block.group(1))
        if call is not None:
            around.append(text[end : block.start()])
            calls.append(call)
            end = block.end()
    if not calls:
        return text, []
    # Whitespace beside a call belongs to the format: templates write it again themselves.
    pieces = [piece.strip() for piece in (*around, text[end:])]
    return "\n".join(piece for piece in pieces if piece), calls


def _call(body: str) -> tuple[str, dict[str, Any]] | None:
    try:
        call = json.loads(body, parse_constant=_no_constant)
        # What JSON text allows but UTF-8 or JSON output does not (lone surrogates, 1e999) could never be sent.
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return None
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, arguments


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
