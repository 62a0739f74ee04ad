r"""1.0 if math-verify finds a completion's answer equal to the expected one, else 0.0.

It compares mathematically: `(x+1)^2` equals `x^2+2x+1`, `\sqrt{12}` equals `2\sqrt{3}`, `\{1,2\}` equals `\{2,1\}`.
Needs the library of that name (the extra `math`); `math_answer` compares numbers without it. In the main
thread, where a reward pool calls it, the library limits its own time; in another thread it cannot, so the caller must.
"""

import threading
from typing import Any

from areal.api.errors import WorkflowError
from areal.reward.math_answer import marked_answer
from areal.utils.installing import missing

try:
    from math_verify import parse, verify  # type: ignore[import-untyped,import-not-found]
except ImportError as error:
    raise WorkflowError(missing("math_verify_reward needs math-verify", error, "math")) from error

_SECONDS = 3
"""For each parse and for each comparison, well inside the 15 seconds of an AsyncRewardWrapper."""


def math_verify_reward(
    prompt: Any, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: Any, **_: Any
) -> float:
    # The library's alarm needs the main thread; elsewhere it raises unless it has no time limit.
    seconds = _SECONDS if threading.current_thread() is threading.main_thread() else None
    expected = parse(_boxed(str(answer)), parsing_timeout=seconds)
    found = parse(completion, parsing_timeout=seconds)
    return float(verify(expected, found, timeout_seconds=seconds))


def _boxed(answer: str) -> str:
    """Marked as mathematics: the library does not read a bare `x^2` at all."""
    return "\\boxed{" + (marked_answer(answer) or answer) + "}"
