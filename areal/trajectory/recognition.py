"""Which recorded completion a conversation continues. Where that cannot be known for certain, a shorter one it does."""

from typing import Protocol

from areal.trajectory.completion import Completion
from areal.trajectory.lines import Line
from areal.trajectory.meaning import Digest, Message, call_ids, same_words


class Recorded(Protocol):
    """What was said before."""

    completions: list[Completion]

    def by_path(self, path: Digest) -> list[Completion]: ...

    def conversation(self, completion: Completion) -> list[Message]: ...


def recognise(tree: Recorded, line: Line) -> tuple[Completion, int] | None:
    """The deepest completion whose conversation these messages begin with, and its answer's place in them."""
    for place in range(len(line.messages) - 1, -1, -1):
        candidates = tree.by_path(line.digests[place]) if line.messages[place]["role"] == "assistant" else []
        chosen = _choose(tree, candidates, line) if candidates else None
        if chosen is not None:
            return chosen, place
    return None


def _choose(tree: Recorded, candidates: list[Completion], line: Line) -> Completion | None:
    """Of completions that mean the same, the one meant; None if the client's words fit none, or several alike.

    Thinking that was sent back and tool-call ids tell them apart. If nothing does and all are the same tokens, it makes
    no difference to what is trained, and the most recent is taken.
    """
    if line.thoughts:
        candidates = [candidate for candidate in candidates if _same_thoughts(tree, candidate, line)]
    if len(candidates) > 1:
        named = [candidate for candidate in candidates if _call_ids(tree, candidate) <= line.call_ids.keys()]
        candidates = named or candidates
    if not candidates or not all(_same_ids(tree, candidates[-1], other) for other in candidates[:-1]):
        return None
    return candidates[-1]


def _same_thoughts(tree: Recorded, candidate: Completion, line: Line) -> bool:
    recorded = tree.conversation(candidate)
    return all(
        same_words(thought, recorded[place].get("reasoning_content", ""))
        for place, thought in line.thoughts.items()
        if place < len(recorded)
    )


def _call_ids(tree: Recorded, candidate: Completion) -> set[str]:
    return {call_id for message in tree.conversation(candidate) for call_id in call_ids(message)}


def _same_ids(tree: Recorded, one: Completion, other: Completion) -> bool:
    """Whether two completions are the same tokens behind the same tokens."""
    while one is not other:
        same_prompt = one.extends == other.extends and one.prompt_ids.tobytes() == other.prompt_ids.tobytes()
        if not same_prompt or one.output_ids.tobytes() != other.output_ids.tobytes():
            return False
        if one.parent is None or other.parent is None:
            return one.parent == other.parent
        one, other = tree.completions[one.parent], tree.completions[other.parent]
    return True
