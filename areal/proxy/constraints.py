"""What a request demands of its answer, as a grammar: a pure function of the request and the model's answer format.

    tool_choice required or named   one or more tool calls and nothing else
    response_format                 JSON of that schema; or tool calls, if there are tools to choose from
    strict tools, free choice       any text, but a call that begins is completed as its schema says
    one call, no end to stop at     the same: `parallel_tool_calls: false` if calls have no end of their own

Before each of these a model that thinks may do so. No other request is constrained. Grammars are in llguidance's
variant of Lark's syntax; tool calls are in the model's own syntax, with arguments that the tool's schema allows.
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from areal.api.io_struct import Grammar
from areal.proxy.errors import bad_request
from areal.proxy.json_schema import json_rule, rebase, require_schema
from areal.proxy.types import Call
from areal.trajectory.parsers import AnswerFormat, ToolCall
from areal.trajectory.parsers.base import CallFrame, ToolSyntax
from areal.trajectory.parsers.hermes import CALL_BEGIN, CALL_END
from areal.trajectory.parsers.qwen3_coder import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    Qwen3Coder,
    declared_types,
)
from areal.trajectory.parsers.reader import ReasoningMarks
from areal.utils.bounded_cache import BoundedCache
from areal.utils.shorten import shortened, shown

REMEMBERED_GRAMMARS = 256
MAX_SCHEMA_BYTES = 1 << 17
"""Of the tools and the schema of a call whose answer must follow them. Others may be as long as the context allows."""
LONG_SCHEMAS = 1 << 14
"""Bytes that take milliseconds to turn into a grammar."""

VALUE_END = f"\n{PARAMETER_END}\n"
TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength")
"""Keywords that cannot be enforced in a value that is written as plain text."""

AnswerSchema = tuple[dict[str, Any], bool]
"""The JSON schema of an answer, and whether it is strict."""


class Constraints:
    """The grammars of one model's requests. An agent repeats its tools in every call, so the latest are kept.

    Safe to use from several threads.
    """

    def __init__(
        self, answers: AnswerFormat, added_tokens: Mapping[str, int], remembered: int = REMEMBERED_GRAMMARS
    ) -> None:
        """`added_tokens`: ids of the tokens that are not part of the tokenizer's vocabulary of text, by their text."""
        self._answers = answers
        self._added_tokens = added_tokens
        self._remembered: BoundedCache[bytes, Grammar | None] = BoundedCache(remembered)
        self._lock = threading.Lock()

    def of(self, call: Call, *, thinking: bool) -> Grammar | None:
        """As `constrain`."""
        if not _may_constrain(call):
            return None
        key = _key(call, thinking)
        with self._lock:
            if key in self._remembered:
                return self._remembered.get(key)
        grammar = constrain(call, self._answers, self._added_tokens, thinking=thinking)
        if len(key) <= MAX_SCHEMA_BYTES:
            with self._lock:
                self._remembered.put(key, grammar)
        return grammar

    def takes_long(self, call: Call, *, thinking: bool) -> bool:
        """Whether `of` takes milliseconds."""
        if not _may_constrain(call):
            return False
        key = _key(call, thinking)
        with self._lock:
            return len(key) > LONG_SCHEMAS and key not in self._remembered


def _may_constrain(call: Call) -> bool:
    return call.tools is not None or call.response_format is not None or call.tool_choice != "auto"


def _key(call: Call, thinking: bool) -> bytes:
    """All that a call's grammar depends on."""
    choice = [call.tool_choice, call.forced_tool, call.parallel_tool_calls, thinking]
    try:
        return orjson.dumps([call.tools, call.response_format, call.format_param, *choice])
    except orjson.JSONEncodeError as error:
        raise bad_request(f"a schema is nested too deeply: {error}", constrained_params(call)[0]) from None


def constrain(
    call: Call, answers: AnswerFormat, added_tokens: Mapping[str, int], *, thinking: bool = False
) -> Grammar | None:
    """None = the answer may be anything. `thinking` = the prompt ended inside it. Raises ApiError 400."""
    try:
        return _grammar(call, answers, added_tokens, thinking)
    except RecursionError:
        raise bad_request("a schema is nested too deeply", constrained_params(call)[0]) from None


def constrained_params(call: Call) -> list[str]:
    """The parameters that a constraint of this call comes from, the chief one first."""
    if call.forced_tool is not None or call.tool_choice == "required" or call.response_format is None:
        return ["tools"]
    return [call.format_param, "tools"] if call.tools else [call.format_param]


def _grammar(call: Call, answers: AnswerFormat, added_tokens: Mapping[str, int], thinking: bool) -> Grammar | None:
    tools = _callable_tools(call)
    must_call = call.tool_choice == "required" or call.forced_tool is not None
    if not must_call and call.response_format is None and not _constrains_calls(call, answers, tools):
        return None
    _require_small([tools, None if must_call else call.response_format], call)
    schema = None if must_call else _answer_schema(call)
    origin = " or ".join(constrained_params(call))
    if schema is not None and tools and answers.calls.bare:
        schema, tools = _value_or_call(schema, tools, answers.calls), []
    if schema is not None and not tools and answers.reasoning is None:
        return Grammar("json_schema", json_rule(*schema), origin)
    rules = _LarkRules(added_tokens)
    calls = _CallRules(rules, answers.calls, tools)
    parallel = call.parallel_tool_calls
    if schema is not None:
        kinds = [rules.add("value", f"%json {json_rule(*schema)}")]
        kinds += [calls.only_calls(parallel=parallel)] if tools else []
        answer = rules.add("answer", " | ".join(kinds))
    else:
        answer = calls.only_calls(parallel=parallel) if must_call else calls.among_text(parallel=parallel)
    start = answer if answers.reasoning is None else f"{_thinking_rule(rules, answers.reasoning, thinking)} {answer}"
    return Grammar("lark", rules.text(start), origin)


def _require_small(schemas: list[Any], call: Call) -> None:
    try:
        size = len(orjson.dumps(schemas))
    except orjson.JSONEncodeError as error:
        raise bad_request(f"a schema is nested too deeply: {error}", constrained_params(call)[0]) from None
    if size > MAX_SCHEMA_BYTES:
        raise bad_request(
            f"the schemas that an answer must follow may have {MAX_SCHEMA_BYTES} bytes, got {size}; offer fewer tools "
            "or smaller schemas, or demand less of the answer",
            constrained_params(call)[0],
        )


def _callable_tools(call: Call) -> list[dict[str, Any]]:
    tools = call.tools or []
    if call.forced_tool is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == call.forced_tool]
    if not tools and (call.forced_tool is not None or call.tool_choice == "required"):
        named = "a tool" if call.forced_tool is None else f"the tool {shown(call.forced_tool)}"
        raise bad_request(f"tool_choice demands a call of {named}, which is not among the tools", "tool_choice")
    return tools


def _constrains_calls(call: Call, answers: AnswerFormat, tools: list[dict[str, Any]]) -> bool:
    """Whether a call, which need not be made, must follow rules if it is."""
    endless = not call.parallel_tool_calls and answers.calls.call_end is None
    return bool(tools) and (endless or any(tool["function"].get("strict") for tool in tools))


def _answer_schema(call: Call) -> AnswerSchema | None:
    wanted = call.response_format
    if wanted is None:
        return None
    if wanted.get("type") == "json_object":
        return {"type": "object"}, True
    schema = wanted.get("schema")
    if not isinstance(schema, dict):
        raise bad_request(
            f"the schema of {call.format_param} must be an object, got {shown(schema)}", call.format_param
        )
    require_schema(schema, call.format_param)
    return schema, bool(wanted.get("strict"))


def _value_or_call(answer: AnswerSchema, tools: Sequence[dict[str, Any]], syntax: ToolSyntax) -> AnswerSchema:
    """For calls that are bare JSON: one schema of such a value or one call, since nothing else tells them apart."""
    assert syntax.frame is not None
    _, _, key, *_ = syntax.frame.before_arguments.split('"')  # ", "parameters":
    schema, strict = answer
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
        raise bad_request(f"the parameters of {shown(function['name'])} must be a schema of type object", "tools")
    require_schema(schema, "tools")
    return {"type": "object", **schema}


def _thinking_rule(rules: "_LarkRules", marks: ReasoningMarks, thinking: bool) -> str:
    """Thinking before the answer; it must be finished if the prompt has begun it."""
    closed = rules.until("thinking", marks.close)
    rules.add("SPACE", r"/\s{1,4}/")
    if thinking:
        return rules.add("thought", f"{closed} SPACE?")
    return rules.add("thought", f"({rules.literal(marks.open)} {closed} SPACE?)?")


@dataclass(frozen=True)
class _CallPattern:
    """One tool's call: fixed text, the arguments' rule, fixed text."""

    opening: str
    arguments: str
    closing: str


class _CallRules:
    """Tool calls as rules of a grammar."""

    def __init__(self, rules: "_LarkRules", syntax: ToolSyntax, tools: Sequence[dict[str, Any]]) -> None:
        """Adds the rules of the tools' arguments. Raises ApiError 400 for a tool that the syntax cannot name."""
        self._rules = rules
        self._syntax = syntax
        self._frame = syntax.frame or CallFrame(between="\n")
        pattern = self._json_call if syntax.frame is not None else self._tagged_call
        self._calls = [pattern(number, tool["function"]) for number, tool in enumerate(tools)]

    def only_calls(self, *, parallel: bool) -> str:
        """One call, or several if `parallel`; nothing else."""
        call = self._alternatives("call")
        rest = f" ({self._between()} {call})*" if parallel else ""
        return self._rules.add("calls", self._join(self._frame.begin, call + rest, self._frame.end))

    def among_text(self, *, parallel: bool) -> str:
        """Any text that may have calls in it; not `parallel` = it ends after the first one."""
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

    def _json_call(self, number: int, function: dict[str, Any]) -> _CallPattern:
        frame, name = self._frame, function["name"]
        self._check_names(name, {})
        rule = json_rule(_parameters(function), strict=bool(function.get("strict")))
        arguments = self._rules.add(f"arguments_{number}", f"%json {rule}")
        return _CallPattern(f"{frame.before_name}{name}{frame.before_arguments}", arguments, frame.after)

    def _tagged_call(self, number: int, function: dict[str, Any]) -> _CallPattern:
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
        return _CallPattern(f"{CALL_BEGIN}\n{FUNCTION}{name}>\n", arguments, f"{FUNCTION_END}\n{CALL_END}")

    def _tag(self, rule: str, key: str, schema: Any, root: dict[str, Any], strict: bool) -> str:
        """One parameter: JSON, or plain text if that is how the parser will read it."""
        opening = self._rules.literal(f"{PARAMETER}{key}>\n")
        types = declared_types(schema, root)
        if types and "string" not in types:
            whole = {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}
            value = f"%json {json_rule(whole, strict=strict)} {self._rules.literal(VALUE_END)}"
        else:
            value = self._plain_value(rule, key, schema, strict)
        return self._rules.add(rule, f"{opening} {value}")

    def _plain_value(self, rule: str, key: str, schema: Any, strict: bool) -> str:
        schema = schema if isinstance(schema, dict) else {}
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(self._rules.literal(choice + VALUE_END) for choice in choices)})"
        limits = [word for word in TEXT_LIMITS if word in schema]
        if strict and limits:
            raise bad_request(
                f"this model writes {shortened(key)} as plain text, so {limits[0]} cannot be strict", "tools"
            )
        return self._rules.until(f"{rule}_text", VALUE_END)

    def _check_names(self, name: str, properties: dict[str, Any]) -> None:
        try:
            self._syntax.render([ToolCall(name, dict.fromkeys(properties, ""))])
        except ValueError as error:
            raise bad_request(
                f"the tool {shown(name, 80)} cannot be called by this model: {shortened(str(error), 100)}", "tools"
            ) from None


class _LarkRules:
    """The rules of one grammar for one tokenizer's added tokens, in the order in which they were added."""

    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        self._tokens = added_tokens
        names = sorted(added_tokens, key=len, reverse=True)
        self._splitter = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []

    def add(self, name: str, body: str) -> str:
        """A rule by that name; returns the name."""
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text, its added tokens as themselves."""
        pieces: list[str] = []
        end = 0
        for found in self._splitter.finditer(text) if self._splitter else ():
            pieces += [_quote(text[end : found.start()]), f"<[{self._tokens[found[0]]}]>"]
            end = found.end()
        return " ".join(piece for piece in (*pieces, _quote(text[end:])) if piece)

    def until(self, name: str, mark: str) -> str:
        """Any text up to and including the first `mark`, which may be a token of its own or spelled out."""
        self._rules.append(f"{name}_spelled[suffix={json.dumps(mark)}]: /(?s:.*)/")
        if mark not in self._tokens:
            return f"{name}_spelled"
        return self.add(name, f"TEXT? {self.literal(mark)} | {name}_spelled")

    def text(self, start: str) -> str:
        """The whole grammar. TEXT is anything but an added token: those are never part of text."""
        return "\n".join([f"start: {start}", *self._rules, "TEXT: /(?s:.+)/"])


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
