r"""1.0 if a completion's final number is the answer's, else 0.0: grade-school problems in the GSM8K format.

The answer is a solution with its number after `####`, or that number alone. The completion's final number is taken from
its last `\boxed{...}`, else after the last `####`, else after "answer is", else it is the last number; in `9 * 2 = 18`
it is the one after `=`. Currency, thousands separators, percent signs and units are ignored: `$1,000`, `1000 dollars`
and `1000.00` are equal.
"""

from typing import Any

from areal.reward.math_answer import answers_equal, extract_answer, number_in


def gsm8k_reward(
    prompt: Any, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: Any, **_: Any
) -> float:
    found, expected = final_number(completion), final_number(str(answer))
    return float(found is not None and expected is not None and answers_equal(found, expected))


def final_number(text: str) -> str | None:
    """The final number of `text`, as it is written; None if there is none."""
    answer = extract_answer(text.replace("\N{MINUS SIGN}", "-"))
    return None if answer is None else number_in(answer.rstrip(" =").rpartition("=")[2], first=True)
