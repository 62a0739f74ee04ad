"""The task that the frameworks' agents solve, and a model that solves it with the calculator."""

from typing import Any

SUM: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
TOOL_RESULT = "<|im_start|>tool\n7<|im_end|>"


def use_the_calculator(prompt: str) -> str:
    """Calls the tool, reads its result and answers."""
    return "It is 7." if TOOL_RESULT in prompt else CALL
