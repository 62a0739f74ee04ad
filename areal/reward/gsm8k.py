r"""1.0 if a completion ends at the number that the answer ends at, else 0.0: grade-school problems in the GSM8K form.

The answer is a solution with its number behind `####`, or that number. Of the completion counts what stands in the last
`\boxed{...}`, else behind the last `####`, else behind "answer is", else its last number. Behind `=` stands the result.
Currency, thousands separators, percent signs and units are ignored: `$1,000`, `1000 dollars` and `1000.00` are one.
"""

from typing import Any

from areal.reward.math_answer import answers_equal, extract_answer, number_in


def gsm8k_reward(
    prompt: Any, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: Any, **_: Any
) -> float:
    found, expected = final_number(completion), final_number(str(answer))
    return float(found is not None and expected is not None and answers_equal(found, expected))


def final_number(text: str) -> str | None:
    """The number that `text` ends at, as it is written; None if there is none."""
    answer = extract_answer(text.replace("\N{MINUS SIGN}", "-"))
    return None if answer is None else number_in(answer.rstrip(" =").rpartition("=")[2], first=True)
