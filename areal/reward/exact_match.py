"""1.0 if a completion says exactly the expected answer, else 0.0.

Where the answer is a number, the completion's last number is compared with it, as text: `0125` is not `125`, because
the answer may be a sequence of digits and not a quantity. Any other answer must be the whole completion, apart from
white space around it. A solution that ends in `#### 12` has the answer `12`. `math_answer` compares quantities and
reads marked answers.
"""

import re
from typing import Any

_NUMBER = re.compile(r"(?<!\d)-?\d+(?:\.\d+)?")


def exact_match_reward(
    prompt: Any, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: Any, **_: Any
) -> float:
    expected = str(answer).rpartition("####")[2].strip()
    if _NUMBER.fullmatch(expected):
        return float(last_number(completion) == expected)
    return float(completion.strip() == expected)


def last_number(text: str) -> str | None:
    """The last integer or decimal in `text`, as it is written there."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None
