"""What a request demands of its answer, as a grammar: a pure function of the request and the model's way of writing.

    tool_choice required or named   one or more tool calls and nothing else
    response_format                 JSON of that schema; or tool calls, where there are tools to choose from
    strict tools, free choice       any text, but a call that begins is completed as its schema says
    one call, no end to stop at     the same: `parallel_tool_calls: false` where calls have no end of their own

In front of each the model may think, if it is one that does. Anything else is not constrained.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import orjson

from areal.api.io_struct import Grammar
from areal.proxy.call_rules import CallRules, Wanted, value_or_call
from areal.proxy.errors import bad_request
from areal.proxy.exchange import Call
from areal.proxy.json_rules import json_rule
from areal.proxy.lark_rules import LarkRules
from areal.trajectory.parsers import AnswerFormat
from areal.trajectory.parsers.reasoning import ReasoningMarks

REMEMBERED = 256
"""Sets of demands whose grammar is kept; the least recently used is forgotten beyond this."""


class Constraints:
    """Grammars of one model's requests. An agent repeats its tools in every call, so the latest are remembered."""

    def __init__(self, answers: AnswerFormat, added_tokens: Mapping[str, int]) -> None:
        self._answers = answers
        self._added_tokens = added_tokens
        self._remembered: OrderedDict[bytes, Grammar | None] = OrderedDict()

    def of(self, call: Call, *, thinking: bool) -> Grammar | None:
        """As `constrain`."""
        if call.tools is None and call.response_format is None and call.tool_choice == "auto":
            return None
        choice = [call.tool_choice, call.forced_tool, call.parallel_tool_calls, thinking]
        try:
            key = orjson.dumps([call.tools, call.response_format, call.format_param, *choice])
        except orjson.JSONEncodeError as error:
            raise bad_request(f"a schema is nested too deeply: {error}", _origin(call)) from None
        if key not in self._remembered:
            self._remembered[key] = constrain(call, self._answers, self._added_tokens, thinking=thinking)
        self._remembered.move_to_end(key)
        if len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        return self._remembered[key]


def constrain(
    call: Call, answers: AnswerFormat, added_tokens: Mapping[str, int], *, thinking: bool = False
) -> Grammar | None:
    """None = the answer may be anything. `thinking` = the prompt ended inside it. Raises ApiError 400."""
    try:
        return _grammar(call, answers, added_tokens, thinking)
    except RecursionError:
        raise bad_request("a schema is nested too deeply", _origin(call)) from None


def _grammar(call: Call, answers: AnswerFormat, added_tokens: Mapping[str, int], thinking: bool) -> Grammar | None:
    tools = _callable_tools(call)
    must_call = call.tool_choice == "required" or call.forced_tool is not None
    wanted = None if must_call else _schema(call)
    if not must_call and wanted is None and not _calls_are_bound(call, answers, tools):
        return None
    if wanted is not None and tools and answers.calls.bare:
        wanted, tools = value_or_call(wanted, tools, answers.calls), []
    if wanted is not None and not tools and answers.reasoning is None:
        return Grammar("json_schema", json_rule(*wanted), _origin(call))
    rules = LarkRules(added_tokens)
    calls = CallRules(rules, answers.calls, tools)
    parallel = call.parallel_tool_calls
    if wanted is not None:
        kinds = [rules.add("value", f"%json {json_rule(*wanted)}")]
        kinds += [calls.only_calls(parallel=parallel)] if tools else []
        answer = rules.add("answer", " | ".join(kinds))
    else:
        answer = calls.only_calls(parallel=parallel) if must_call else calls.among_text(parallel=parallel)
    start = answer if answers.reasoning is None else f"{_thought(rules, answers.reasoning, thinking)} {answer}"
    return Grammar("lark", rules.text(start), _origin(call))


def _callable_tools(call: Call) -> list[dict[str, Any]]:
    tools = call.tools or []
    if call.forced_tool is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == call.forced_tool]
    if not tools and (call.forced_tool is not None or call.tool_choice == "required"):
        named = "a tool" if call.forced_tool is None else f"the tool {call.forced_tool!r}"
        raise bad_request(f"tool_choice demands a call of {named}, which is not among the tools", "tool_choice")
    return tools


def _calls_are_bound(call: Call, answers: AnswerFormat, tools: list[dict[str, Any]]) -> bool:
    """A call need not be made, but if one is, there is something to see to."""
    endless = not call.parallel_tool_calls and answers.calls.call_end is None
    return bool(tools) and (endless or any(tool["function"].get("strict") for tool in tools))


def _schema(call: Call) -> Wanted | None:
    """The schema of the answer, and whether all of it must be seen to."""
    wanted = call.response_format
    if wanted is None:
        return None
    if wanted.get("type") == "json_object":
        return {"type": "object"}, True
    schema = wanted.get("schema")
    if not isinstance(schema, dict):
        raise bad_request(
            f"the schema of {call.format_param} must be an object, got {schema!r:.200}", call.format_param
        )
    return schema, bool(wanted.get("strict"))


def _thought(rules: LarkRules, marks: ReasoningMarks, thinking: bool) -> str:
    """Thinking in front of the answer; it must be finished if the prompt has begun it."""
    closed = rules.until("thinking", marks.close)
    rules.add("SPACE", r"/\s{1,4}/")
    if thinking:
        return rules.add("thought", f"{closed} SPACE?")
    return rules.add("thought", f"({rules.literal(marks.open)} {closed} SPACE?)?")


def _origin(call: Call) -> str:
    """The parameters that the constraint comes from."""
    if call.forced_tool is not None or call.tool_choice == "required" or call.response_format is None:
        return "tools"
    return f"{call.format_param} or tools" if call.tools else call.format_param
