"""Things that tests of several dialects say."""

from typing import Any

QUESTION = {"role": "user", "content": "Sort 5291"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": 2}'

ANSWERS = {
    "plain": "1259",
    "several characters of several bytes": "zwölf 你好 🙂!",
    "white space around": "\n  1259 \n",
    "one call": CALL,
    "text and a call": f"I will add.\n{CALL}",
    "two calls": f"{CALL}\n{CALL}",
    "text behind a call": f"{CALL}\nthere",
    "malformed call": '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>',
    "half a mark": "a < b, <tool_ca",
    "nothing": "",
}
"""What the engine says, by what is hard about it."""
