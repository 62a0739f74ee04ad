"""Tool calls as rules of a grammar: in the model's own syntax, with arguments that the tool's schema allows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.proxy.errors import bad_request
from areal.proxy.json_rules import json_rule, rebase
from areal.proxy.lark_rules import LarkRules
from areal.trajectory.parsers import ToolCall
from areal.trajectory.parsers.hermes import CALL_BEGIN, CALL_END
from areal.trajectory.parsers.qwen3_coder import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    Qwen3Coder,
    declared_types,
)
from areal.trajectory.parsers.syntax import CallFrame, ToolSyntax

Wanted = tuple[dict[str, Any], bool]
"""A schema, and whether it is strict."""

VALUE_END = f"\n{PARAMETER_END}\n"
TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength")
"""Keywords that cannot be seen to where a value is written as plain text."""


@dataclass(frozen=True)
class _Call:
    """One tool's call: fixed text, the arguments' rule, fixed text."""

    opening: str
    arguments: str
    closing: str


class CallRules:
    def __init__(self, rules: LarkRules, syntax: ToolSyntax, tools: Sequence[dict[str, Any]]) -> None:
        """Adds the rules of the tools' arguments. Raises ApiError 400 for a tool that the syntax cannot name."""
        self._rules = rules
        self._syntax = syntax
        self._frame = syntax.frame or CallFrame(between="\n")
        make = self._framed if syntax.frame is not None else self._tagged
        self._calls = [make(number, tool["function"]) for number, tool in enumerate(tools)]

    def only_calls(self, *, parallel: bool) -> str:
        """One call, or several if `parallel`; nothing else."""
        call = self._alternatives("call")
        rest = f" ({self._between()} {call})*" if parallel else ""
        return self._rules.add("calls", self._join(self._frame.begin, call + rest, self._frame.end))

    def among_text(self, *, parallel: bool) -> str:
        """Any text, in which calls may stand; not `parallel` = it ends behind the first one."""
        if self._syntax.bare:
            self._rules.add("FREE", rf"/\s*[^\s;{re.escape(self._syntax.bare)}](?s:.*)/")
            return self._rules.add("mixed", f"{self.only_calls(parallel=parallel)} | FREE?")
        block = f"{self._rules.until('before_call', self._syntax.marks[0])} {self._unmarked(parallel)}"
        return self._rules.add("mixed", f"({block})* TEXT?" if parallel else f"{block} | TEXT?")

    def _unmarked(self, parallel: bool) -> str:
        """A block of calls without the mark that opens it."""
        mark, frame = self._syntax.marks[0], self._frame
        if not frame.begin:
            return self._alternatives("first_call", mark)
        call = self._alternatives("call")
        rest = f" ({self._between()} {call})*" if parallel else ""
        return self._rules.add("block", self._join(frame.begin.removeprefix(mark), call + rest, frame.end))

    def _alternatives(self, name: str, without: str = "") -> str:
        bodies = [self._join(c.opening.removeprefix(without), c.arguments, c.closing) for c in self._calls]
        return self._rules.add(name, " | ".join(bodies))

    def _between(self) -> str:
        text = self._rules.literal(self._frame.between)
        return f"({text})?" if text and self._frame.between.isspace() else text

    def _join(self, before: str, body: str, after: str) -> str:
        return f"{self._rules.literal(before)} {body} {self._rules.literal(after)}".strip()

    def _framed(self, number: int, function: dict[str, Any]) -> _Call:
        frame, name = self._frame, function["name"]
        self._check_names(name, {})
        rule = json_rule(_parameters(function), strict=bool(function.get("strict")))
        arguments = self._rules.add(f"arguments_{number}", f"%json {rule}")
        return _Call(f"{frame.before_name}{name}{frame.before_arguments}", arguments, frame.after)

    def _tagged(self, number: int, function: dict[str, Any]) -> _Call:
        if not isinstance(self._syntax, Qwen3Coder):
            raise bad_request(f"calls cannot be forced in the syntax of {self._syntax.name}", "tool_choice")
        name, schema = function["name"], _parameters(function)
        properties = schema.get("properties", {})
        self._check_names(name, properties)
        tags = [
            self._tag(f"argument_{number}_{place}", key, part, schema, bool(function.get("strict")))
            + ("" if key in schema.get("required", ()) else "?")
            for place, (key, part) in enumerate(properties.items())
        ]
        arguments = self._rules.add(f"arguments_{number}", " ".join(tags) or '""')
        return _Call(f"{CALL_BEGIN}\n{FUNCTION}{name}>\n", arguments, f"{FUNCTION_END}\n{CALL_END}")

    def _tag(self, rule: str, key: str, schema: Any, root: dict[str, Any], strict: bool) -> str:
        """One parameter: JSON, or as plain text what the parser will read as text."""
        opening = self._rules.literal(f"{PARAMETER}{key}>\n")
        types = declared_types(schema, root)
        if types and "string" not in types:
            whole = {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}
            value = f"%json {json_rule(whole, strict=strict)} {self._rules.literal(VALUE_END)}"
        else:
            value = self._plain(rule, key, schema, strict)
        return self._rules.add(rule, f"{opening} {value}")

    def _plain(self, rule: str, key: str, schema: Any, strict: bool) -> str:
        schema = schema if isinstance(schema, dict) else {}
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(self._rules.literal(choice + VALUE_END) for choice in choices)})"
        limits = [word for word in TEXT_LIMITS if word in schema]
        if strict and limits:
            raise bad_request(f"this model writes {key} as plain text, so {limits[0]} cannot be strict", "tools")
        return self._rules.until(f"{rule}_text", VALUE_END)

    def _check_names(self, name: str, properties: dict[str, Any]) -> None:
        try:
            self._syntax.render([ToolCall(name, dict.fromkeys(properties, ""))])
        except ValueError as error:
            raise bad_request(f"the tool {name!r} cannot be called by this model: {error}", "tools") from None


def value_or_call(wanted: Wanted, tools: Sequence[dict[str, Any]], syntax: ToolSyntax) -> Wanted:
    """For calls that are bare JSON: one schema of such a value or one call, since nothing else tells them apart."""
    assert syntax.frame is not None
    _, _, key, *_ = syntax.frame.before_arguments.split('"')  # ", "parameters":
    schema, strict = wanted
    kinds = [rebase(schema, "#/anyOf/0")]
    for place, function in enumerate((tool["function"] for tool in tools), start=1):
        arguments = rebase(_parameters(function), f"#/anyOf/{place}/properties/{key}")
        properties = {"name": {"const": function["name"]}, key: arguments}
        kinds.append({"type": "object", "properties": properties, "required": ["name", key]})
        strict = strict and bool(function.get("strict"))
    return {"anyOf": kinds}, strict


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whether it says so or not."""
    schema = function.get("parameters")
    if schema is None:
        schema = {"properties": {}}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise bad_request(f"the parameters of {function['name']!r} must be a schema of type object", "tools")
    return {"type": "object", **schema}
