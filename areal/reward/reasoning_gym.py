"""What reasoning-gym's own scorer says of an answer to one of its problems: from 0.0 to 1.0.

The answer is what the last `<answer>...</answer>` of a completion holds, else the whole completion. The scorer is that
of the generator that the task names, with the same settings. Needs the library of that name (extra `reasoning-gym`).
"""

import functools
import json
import re
from typing import Any

from areal.api.errors import WorkflowError
from areal.utils.installing import missing

try:
    import reasoning_gym  # type: ignore[import-untyped,import-not-found]
except ImportError as error:
    raise WorkflowError(missing("reasoning_gym_reward needs reasoning-gym", error, "reasoning-gym")) from error

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_reward(
    prompt: Any,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    question: str,
    answer: Any,
    metadata: dict[str, Any],
    generator: dict[str, Any],
    **_: Any,
) -> float:
    tagged = _TAGGED.findall(completion)
    said = (tagged[-1] if tagged else completion).strip()
    scorer = _scorer(generator["name"], json.dumps(generator["settings"], sort_keys=True))
    try:
        return float(scorer.score_answer(said, {"question": question, "answer": answer, "metadata": metadata}))
    except Exception:  # some scorers parse without a check: an answer that they cannot read is wrong
        return 0.0


@functools.lru_cache(maxsize=64)
def _scorer(name: str, settings: str) -> Any:
    """A generator that makes no problem: some make all of theirs at once."""
    return reasoning_gym.create_dataset(name, **{**json.loads(settings), "seed": 0, "size": 1})
