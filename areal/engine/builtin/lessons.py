"""What the built-in model is warmed up on: short conversations that show the form of an answer, and half of the skill.

Lessons only use training problems. They cover plain answers, a second try after a wrong one, and calculator calls, so
that agents of every shape begin with some success.
"""

import random
from collections.abc import Iterator
from itertools import cycle
from typing import Any

from areal.dataset.procedural import TASKS, Problem
from areal.engine.supervised import Example

RETRY = "That is wrong. Try again."

CALCULATOR_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "properties": {
                    "a": {"title": "A", "type": "integer"},
                    "b": {"title": "B", "type": "integer"},
                },
                "required": ["a", "b"],
                "title": f"{name}_args",
                "type": "object",
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    for name, description in (("add", "Add two integers."), ("multiply", "Multiply two integers."))
]
"""Tool schemas as the OpenAI Agents SDK writes them for two-integer functions."""


def lessons(seed: int) -> Iterator[Example]:
    """An endless stream: sorting with and without tools at hand, sums, second tries, calculator calls."""
    draw = random.Random(seed)
    sorting = cycle(list(TASKS["sort-digits"].problems("train", seed)))
    sums = cycle(list(TASKS["sums"].problems("train", seed)))
    while True:
        kind = draw.random()
        if kind < 0.45:
            yield plain(next(sorting)), None
        elif kind < 0.55:
            yield plain(next(sums)), None
        elif kind < 0.65:
            problem = next(sorting)
            yield second_try(problem, _shuffled(problem.answer, draw)), None
        elif kind < 0.75:
            yield plain(next(sorting)), CALCULATOR_TOOLS
        else:
            yield tool_use(next(sums)), CALCULATOR_TOOLS


def plain(problem: Problem) -> list[dict[str, Any]]:
    return [*problem.as_task()["messages"], {"role": "assistant", "content": problem.answer}]


def second_try(problem: Problem, wrong: str) -> list[dict[str, Any]]:
    """A wrong answer that is not learned, the rebuke, the right answer."""
    return [
        *problem.as_task()["messages"],
        {"role": "assistant", "content": wrong, "learn": False},
        {"role": "user", "content": RETRY},
        {"role": "assistant", "content": problem.answer},
    ]


def _shuffled(text: str, draw: random.Random) -> str:
    letters = list(text)
    draw.shuffle(letters)
    return "".join(letters)


def tool_use(problem: Problem) -> list[dict[str, Any]]:
    """A sum done with the calculator."""
    first, second = problem.question.removeprefix("What is ").removesuffix("?").split(" + ")
    call = {"name": "add", "arguments": f'{{"a": {first}, "b": {second}}}'}
    return [
        *problem.as_task()["messages"],
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": problem.answer},
        {"role": "assistant", "content": problem.answer},
    ]
