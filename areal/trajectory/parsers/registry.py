"""Which parsers a model needs: by name, or as its chat template shows."""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, TypeVar

from areal.trajectory.parsers.base import ToolSyntax
from areal.trajectory.parsers.deepseek import CALLS_BEGIN, DeepSeek, DeepSeekBare
from areal.trajectory.parsers.hermes import Hermes
from areal.trajectory.parsers.llama3 import PYTHON_TAG, Llama3
from areal.trajectory.parsers.mistral import MARK, Mistral, MistralNamed
from areal.trajectory.parsers.qwen3_coder import Qwen3Coder
from areal.trajectory.parsers.reader import AnswerFormat, ReasoningMarks

_Parser = TypeVar("_Parser", ToolSyntax, ReasoningMarks)


def _by_name(parsers: Iterable[_Parser]) -> "MappingProxyType[str, _Parser]":
    return MappingProxyType({parser.name: parser for parser in parsers})


TOOL_PARSERS = _by_name([Hermes(), Qwen3Coder(), Llama3(), Mistral(), MistralNamed(), DeepSeek(), DeepSeekBare()])
REASONING_PARSERS = _by_name(
    [ReasoningMarks("think", "<think>", "</think>"), ReasoningMarks("mistral", "[THINK]", "[/THINK]")]
)
NONE = "none"
"""The reasoning parser that leaves thinking in the text."""


def choose(template: Any, tool_parser: str | None = None, reasoning_parser: str | None = None) -> AnswerFormat:
    """The parsers of these names; None = as the template shows. Raises ValueError, which lists the choices."""
    detected = detect(template)
    calls = detected.calls if tool_parser is None else _named("tool_parser", tool_parser, TOOL_PARSERS)
    if reasoning_parser is None or reasoning_parser == NONE:
        return AnswerFormat(calls, detected.reasoning if reasoning_parser is None else None)
    return AnswerFormat(calls, _named("reasoning_parser", reasoning_parser, REASONING_PARSERS, NONE))


def detect(template: Any) -> AnswerFormat:
    """The parsers for the marks in a chat template (one text, or texts by name); Hermes if it has none for calls."""
    text = template if isinstance(template, str) else "\n".join(map(str, dict(template).values()))
    marks = next((marks for marks in REASONING_PARSERS.values() if marks.close in text), None)
    return AnswerFormat(TOOL_PARSERS[_tool_parser(text)], marks)


def _tool_parser(template: str) -> str:
    if "<function=" in template:
        return Qwen3Coder.name
    if MARK in template:
        return MistralNamed.name if "[ARGS]" in template else Mistral.name
    if CALLS_BEGIN in template:
        return DeepSeek.name if "```json" in template else DeepSeekBare.name
    if "<tool_call>" not in template and (PYTHON_TAG in template or '"parameters": ' in template):
        return Llama3.name
    return Hermes.name


def _named(what: str, name: str, choices: "MappingProxyType[str, _Parser]", *more: str) -> _Parser:
    if name not in choices:
        raise ValueError(
            f"{what} must be one of {', '.join([*choices, *more])}, got {name!r}; None reads it off the template"
        )
    return choices[name]
