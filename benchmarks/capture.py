"""What does it cost to remember a conversation? 200 turns against a model whose answers cost nothing.

A client sends the whole conversation with every call, so reading its JSON and comparing it with what is known grow with
it, and so do the ids that the engine is asked to continue: these are inherent in the wire and are shown apart. The rest
(placing the call in the tree, rendering, tokenising, recording) must cost what the new turn costs, and the bytes stored
must grow by what is new. The peer of the same run renders the whole conversation and digests every message each time.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from areal.api.io_struct import ModelResponse
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.trajectory import Renderer, Tree
from areal.trajectory.answer import read_answer
from areal.trajectory.matching import Conversation, ConversationCache, Normalise
from areal.trajectory.message import Message
from areal.trajectory.parsers import ToolCall
from areal.trajectory.tree import Completion, Prompt
from benchmarks.report import Aim, main

TURNS = 200
ROUNDS = 8
EARLY, LATE = slice(20, 40), slice(180, 200)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
WORDS = "the quick brown fox jumps over the lazy dog and asks for 12 more numbers to be added up "

Turn = Callable[[int, Renderer], tuple[str, list[dict[str, Any]]]]
"""The answer of a turn, and the client's messages after it."""


def chat_turn(number: int, renderer: Renderer) -> tuple[str, list[dict[str, Any]]]:
    return f"Answer {number}: {WORDS}", [{"role": "user", "content": f"Question {number}: {WORDS}"}]


def tool_turn(number: int, renderer: Renderer) -> tuple[str, list[dict[str, Any]]]:
    answer = f"Step {number}.\n{renderer.format.calls.render([ToolCall('add', {'a': number})])}"
    return answer, [{"role": "tool", "content": f"Result {number}: {WORDS}"}]


KINDS: dict[str, Turn] = {"chat": chat_turn, "tool loop": tool_turn}


@dataclass
class Costs:
    """Microseconds of processor time by turn, and bytes stored after each."""

    request: list[float] = field(default_factory=list)
    compare: list[float] = field(default_factory=list)
    engine_ids: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)


class TimedCache(ConversationCache):
    """Knows how long it takes to compare a request with the earlier ones."""

    seconds = 0.0

    def read(self, messages: list[Message], normalise: Normalise) -> Conversation:
        began = time.thread_time()
        conversation = super().read(messages, normalise)
        self.seconds = time.thread_time() - began
        return conversation


class TimedTree(Tree):
    """Knows how long it takes to list the ids for the engine."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer)
        self._conversations: TimedCache = TimedCache()
        self.ids_seconds = 0.0

    @property
    def compare_seconds(self) -> float:
        return self._conversations.seconds

    def forget(self) -> None:
        self._conversations = TimedCache()

    def token_ids(self, completion: Completion, newer: Sequence[int] = ()) -> list[int]:
        began = time.thread_time()
        ids = super().token_ids(completion, newer)
        self.ids_seconds += time.thread_time() - began
        return ids


def converse(renderer: Renderer, turn: Turn, first: int, *, forget: bool = False, weigh: bool = False) -> Costs:
    """One conversation as a client holds it, whose turns are numbered from `first` on: what was said before is known.

    `forget` = nothing of an earlier call is used to read the next.
    """
    tree, costs = TimedTree(renderer), Costs()
    messages: list[dict[str, Any]] = [{"role": "system", "content": WORDS}, {"role": "user", "content": WORDS}]
    for number in range(TURNS):
        answer, newer = turn(first + number, renderer)
        output = [*renderer.encode(answer), renderer.tokenizer.eos_token_id]
        wire = orjson.dumps(messages)
        if forget:
            tree.forget()
        tree.ids_seconds = 0.0
        gc.disable()  # it runs when it likes, and would be charged to turns at random
        began = time.thread_time()
        request = orjson.loads(wire)
        read = time.thread_time()
        prompt = record(tree, request, output, number)
        ended = time.thread_time()
        del prompt
        freed = time.thread_time()
        gc.enable()
        costs.request.append(1e6 * (read - began))
        costs.engine_ids.append(1e6 * (tree.ids_seconds + freed - ended))
        costs.compare.append(1e6 * tree.compare_seconds)
        costs.ours.append(1e6 * (ended - read - tree.ids_seconds - tree.compare_seconds))
        if weigh:
            costs.stored.append(stored_bytes(tree))
        message = tree.completions[-1].message
        call_id = "".join(call["id"] for call in message.get("tool_calls", ()))
        messages = [*messages, message, *({**each, "tool_call_id": call_id} for each in newer)]
    assert all(node.extends for node in tree.completions[1:])
    return costs


def record(tree: Tree, messages: list[dict[str, Any]], output: list[int], number: int) -> Prompt:
    """What the proxy does with the tree for one call."""
    prompt = tree.prompt(messages, TOOLS)
    count = len(output)
    response = ModelResponse(prompt.ids, output, [-1.0] * count, [0] * count, "stop")
    answer = read_answer(tree.renderer, response, completion_id=str(number), stop_ids=output[-1:], tools=prompt.tools)
    tree.add(prompt, response, answer, completion_id=f"chatcmpl-{number}", temperature=1.0)
    return prompt


def stored_bytes(tree: Tree) -> int:
    """Everything that is reachable from the tree but not from its renderer, each object once."""
    seen = {id(tree.renderer)}
    waiting, total = list(vars(tree).values()), 0
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        waiting += [] if isinstance(thing, np.ndarray) else gc.get_referents(thing)
    return total


def exponent(values: list[float]) -> float:
    """p of the best fit value ~ turn^p, from turn 20 on."""
    turns = np.log(np.arange(len(values))[20:])
    return float(np.polyfit(turns, np.log(np.maximum(values[20:], 1e-9)), 1)[0])


def best_of(rounds: list[Costs]) -> Costs:
    def least(name: str) -> list[float]:
        return [min(values) for values in zip(*(getattr(costs, name) for costs in rounds), strict=True)]

    return Costs(least("request"), least("compare"), least("engine_ids"), least("ours"))


def early_and_late(values: list[float]) -> dict[str, float]:
    early, late = (round(statistics.median(values[where]), 1) for where in (EARLY, LATE))
    return {"turns_20_40": early, "turns_180_200": late}


def figures_of(costs: Costs) -> dict[str, Any]:
    return {
        "stored_bytes": costs.stored[-1],
        "stored_bytes_per_turn": round((costs.stored[-1] - costs.stored[19]) / (TURNS - 20)),
        "stored_exponent": round(exponent([float(size) for size in costs.stored]), 3),
        "ours_us": early_and_late(costs.ours),
        "ours_mean_us": round(statistics.fmean(costs.ours), 1),
        "ours_exponent": round(exponent(costs.ours), 3),
        "inherent_us": {
            "request_json": early_and_late(costs.request),
            "compare": early_and_late(costs.compare),
            "engine_ids": early_and_late(costs.engine_ids),
        },
    }


def measure(tokenizer: Any) -> dict[str, tuple[Costs, Costs]]:
    """Of each kind of conversation, ours and the peer's; rounds take turns, so that a busy moment hits both kinds."""
    renderer, whole = Renderer(tokenizer), Renderer(tokenizer)
    whole.skips_middle = False
    ours: dict[str, list[Costs]] = {name: [] for name in KINDS}
    peers: dict[str, list[Costs]] = {name: [] for name in KINDS}
    for number in range(ROUNDS):
        for name, turn in KINDS.items():
            ours[name].append(converse(renderer, turn, number * TURNS))
            if number < 2:
                peers[name].append(converse(whole, turn, number * TURNS, forget=True))
    found = {name: (best_of(ours[name]), best_of(peers[name])) for name in KINDS}
    for name, turn in KINDS.items():
        found[name][0].stored = converse(renderer, turn, ROUNDS * TURNS, weigh=True).stored
    return found


def run() -> tuple[dict[str, Any], list[Aim]]:
    figures: dict[str, Any] = {}
    aims: list[Aim] = []
    tokenizer = make_tokenizer([WORDS, "Answer Question Step Result"], 400, 1 << 20)
    for name, (costs, peer) in measure(tokenizer).items():
        found = figures_of(costs)
        found["peer_us"] = early_and_late(list(map(sum, zip(peer.ours, peer.compare, strict=True))))
        figures[name] = found
        growth = found["ours_us"]["turns_180_200"] / found["ours_us"]["turns_20_40"]
        aims += [
            Aim.at_most(f"{name}: exponent of the bytes stored by turn", found["stored_exponent"], 1.05),
            Aim.at_most(f"{name}: cost of a call at turns 180-200 over turns 20-40", growth, 1.2),
            Aim.at_most(f"{name}: exponent of the cost of a call by turn", found["ours_exponent"], 0.2),
        ]
        print(f"{name}: {found}", file=sys.stderr)
    return figures, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
