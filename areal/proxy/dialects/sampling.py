"""Fields that several dialects have about how an answer is drawn: penalties, thinking, and what is told of tokens."""

import re
from typing import Any

from areal.api.io_struct import Steering
from areal.proxy.dialects import fields
from areal.proxy.dialects.base import ParameterRules
from areal.proxy.errors import bad_request
from areal.proxy.types import TokenChance
from areal.utils.shorten import shown

MAX_TOP_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED = 1 << 14
"""Tokens that one call may bias."""
STEERING = ("frequency_penalty", "presence_penalty", "logit_bias")
THINKING = {"none": False, "minimal": False, "low": True, "medium": True, "high": True, "xhigh": True, "max": True}
"""Efforts by whether they ask for thinking: how much of it is the model's."""

_TOKEN = re.compile(r"[0-9]{1,9}")


def steering(body: dict[str, Any], rules: ParameterRules) -> Steering | None:
    """Raises ApiError 400 for what is out of range, or where answers are trained."""
    if body.keys().isdisjoint(STEERING):
        return None
    frequency = fields.number(body, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0
    presence = fields.number(body, "presence_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0
    bias = _bias(body)
    if not (frequency or presence or bias):
        return None
    if rules.trained:
        for name in STEERING:
            if body.get(name):
                rule = "is not supported where answers are trained: it changes the distribution they are drawn from"
                rules.refuse_or_drop(name, body[name], rule)
        return None
    return Steering(frequency, presence, bias)


def _bias(body: dict[str, Any]) -> dict[int, float]:
    wire = fields.mapping(body, "logit_bias", "logit_bias")
    if len(wire) > MAX_BIASED:
        raise bad_request(f"logit_bias may have {MAX_BIASED} tokens, got {len(wire)}", "logit_bias")
    bias = {}
    for token in wire:
        if not _TOKEN.fullmatch(token):
            raise bad_request(f"logit_bias must be keyed by token ids, got {shown(token)}", "logit_bias")
        value = fields.number(wire, token, -MAX_BIAS, MAX_BIAS)
        bias[int(token)] = 0.0 if value is None else value
    return bias


def thinks(effort: Any, where: str, rules: ParameterRules) -> bool | None:
    """Whether a call with this effort is to think; None = as the template does. Raises ApiError 400."""
    if effort is None:
        return None
    if not isinstance(effort, str) or effort not in THINKING:
        raise bad_request(f"{where} must be one of {', '.join(THINKING)}, got {shown(effort)}", where)
    return thinking(THINKING[effort], effort, where, rules)


def thinking(wanted: bool, value: Any, where: str, rules: ParameterRules) -> bool | None:
    """The same for who says plainly whether it is to think."""
    if rules.thinking_switch:
        return wanted
    if wanted and not rules.thinks:
        rules.refuse_or_drop(where, value, "needs a model that thinks: its chat template has no place for it")
    elif rules.thinks and not wanted:
        rules.refuse_or_drop(where, value, "cannot turn thinking off: the model's chat template has no switch for it")
    return None


def token_object(chance: TokenChance) -> dict[str, Any]:
    """As both of OpenAI's newer dialects write a token."""
    return {"token": chance.text, "logprob": chance.logprob, "bytes": list(chance.raw)}
