"""1.0 if the program in a completion passes every test of its task, else 0.0.

The program is the last fenced block, or the whole completion if there is none; it is Python, with the standard library.
`tests` are of two kinds, which may be mixed:

- `{"input": "3 4", "output": "7"}`: run the program on this standard input and compare what it prints, ignoring white
  space at the ends of lines and of the text. The expected output never enters the sandbox.
- `"assert add(3, 4) == 7"`: statements that run after the program, in the same interpreter. A program can cheat here;
  use the other kind where that matters.

The program runs in a sandbox (`areal/reward/sandbox`); `limits.timeout_seconds` covers all tests together. Whatever it
does there is at worst a wrong answer. A machine that cannot isolate it is refused (`ConfigError`).
"""

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal.reward.sandbox import AskedIsolation, Isolation, SandboxLimits, find_isolation, run_program

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)

Test = Mapping[str, Any] | str


def code_reward(
    prompt: Any,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    tests: Sequence[Test] | str,
    *,
    limits: SandboxLimits = SandboxLimits(),  # noqa: B008  (frozen)
    isolation: AskedIsolation = "auto",
    **_: Any,
) -> float:
    """`tests` may also be the JSON text of such a list, so that one column of a table can hold both kinds."""
    kind = find_isolation(isolation)
    statements, pairs = _by_kind(json.loads(tests) if isinstance(tests, str) else tests)
    program = extract_program(completion)
    deadline = time.monotonic() + limits.timeout_seconds
    if statements and not _passes_statements(program, statements, limits, kind):
        return 0.0
    return float(all(_passes_pair(program, pair, _remaining(limits, deadline), kind) for pair in pairs))


def _check_machine(*, isolation: AskedIsolation = "auto", **_: Any) -> None:
    find_isolation(isolation)


# Called when an `AsyncRewardWrapper` of it is made; and what a dataset of strangers must not set.
code_reward.check_machine = _check_machine  # type: ignore[attr-defined]
code_reward.settings = ("limits", "isolation")  # type: ignore[attr-defined]


def extract_program(completion: str) -> str:
    """The last fenced block; one that is cut off counts up to where it ends."""
    blocks: list[str] = _FENCE.findall(completion)
    return blocks[-1] if blocks else completion


def _by_kind(tests: Sequence[Test]) -> tuple[list[str], list[Mapping[str, Any]]]:
    statements = [test for test in tests if isinstance(test, str)]
    pairs = [test for test in tests if isinstance(test, Mapping) and {"input", "output"} <= set(test)]
    if not tests or len(statements) + len(pairs) < len(tests):
        raise ValueError(f'tests must be a list of {{"input": ..., "output": ...}} or of statements, got {tests!r:.80}')
    return statements, pairs


def _passes_statements(program: str, statements: list[str], limits: SandboxLimits, isolation: Isolation) -> bool:
    """Success prints a secret word last, so a program that exits before the tests does not pass."""
    word = secrets.token_hex(16)
    text = "\n".join([program, *statements, f"import sys; sys.stdout.flush(); sys.stdout.write({word!r})"])
    run = run_program(text, limits=limits, isolation=isolation)
    return run.status == 0 and run.output.endswith(word)


def _passes_pair(program: str, pair: Mapping[str, Any], limits: SandboxLimits | None, isolation: Isolation) -> bool:
    if limits is None:
        return False
    run = run_program(program, str(pair["input"]), limits, isolation=isolation)
    return run.status == 0 and _lines(run.output) == _lines(str(pair["output"]))


def _remaining(limits: SandboxLimits, deadline: float) -> SandboxLimits | None:
    """What is left of the limits; None if no time is."""
    seconds = deadline - time.monotonic()
    return dataclasses.replace(limits, timeout_seconds=seconds) if seconds > 0 else None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
