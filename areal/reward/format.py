"""1.0 if a completion has the required form, else 0.0, whatever its content.

The form is `<think>...</think><answer>...</answer>`: each tag once, in this order, nothing but white space around them.
Other tags, or a regular expression for the whole completion, are given as arguments:
`functools.partial(format_reward, tags=("plan", "code"))`, or as keys of the task. If the prompt ends with the first
opening tag, the completion begins inside it.
"""

import re
from collections.abc import Sequence
from typing import Any


def format_reward(
    prompt: Any,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    tags: Sequence[str] = ("think", "answer"),
    pattern: str | None = None,
    **_: Any,
) -> float:
    """`pattern`, if given, replaces `tags`; its `.` matches line ends too."""
    if pattern is not None:
        return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
    opening = f"<{tags[0]}>"
    opened = isinstance(prompt, str) and prompt.rstrip().endswith(opening)
    return float(re.fullmatch(_tagged(tags), opening + completion if opened else completion, re.DOTALL) is not None)


def _tagged(tags: Sequence[str]) -> str:
    names = [re.escape(tag) for tag in tags]
    inside = rf"(?:(?!</?(?:{'|'.join(names)})>).)*+"  # possessive, so that time is linear
    return r"\s*" + "".join(rf"<{name}>{inside}</{name}>\s*" for name in names)
