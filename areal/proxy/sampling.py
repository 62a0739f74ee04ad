"""How one call is sampled: the session's settings, changed by what the request asks for."""

from typing import Any

from areal.config.generation import GenerationHyperparameters
from areal.proxy.errors import too_long
from areal.proxy.exchange import Call


def sampling(
    base: GenerationHyperparameters, call: Call, *, prompt_length: int, max_positions: int, call_end: str | None
) -> GenerationHyperparameters:
    """Logits are divided by 1 where nothing is sampled. `call_end` is a text to stop at behind the first tool call."""
    changes: dict[str, Any] = {"max_new_tokens": _room(base, call, prompt_length, max_positions)}
    changes["min_new_tokens"] = min(base.min_new_tokens, changes["max_new_tokens"])
    temperature = base.temperature if call.temperature is None else call.temperature
    greedy = temperature == 0 or (base.greedy and call.temperature is None)
    changes |= {"greedy": greedy, "temperature": 1.0 if greedy else temperature}
    asked = {"top_p": call.top_p, "top_k": call.top_k, "seed": call.seed}
    changes |= {name: value for name, value in asked.items() if value is not None}
    return base.new(**changes, stop=_stop(base, call, call_end))


def _stop(base: GenerationHyperparameters, call: Call, call_end: str | None) -> list[str]:
    stop = base.stop if call.stop is None else call.stop
    if call.tools is None or call.parallel_tool_calls or call_end is None:
        return stop  # where calls have no end to stop at, or something else must hold, a grammar sees to it
    return [*stop, call_end]


def _room(base: GenerationHyperparameters, call: Call, prompt_length: int, max_positions: int) -> int:
    """How many tokens the answer may have."""
    left = max_positions - prompt_length
    if left < 1:
        raise too_long(
            f"the model has {max_positions} positions, the messages take {prompt_length} tokens and leave "
            "none for an answer; shorten them"
        )
    if call.max_tokens is None:
        return min(base.max_new_tokens, left)
    if call.max_tokens > left:
        raise too_long(
            f"the model has {max_positions} positions, the messages take {prompt_length} tokens and "
            f"{call.max_tokens} were asked for the answer; ask for at most {left}"
        )
    return call.max_tokens
