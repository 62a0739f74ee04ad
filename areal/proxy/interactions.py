"""What the direct client exports: each conversation with its row, to be returned by a RolloutWorkflow."""

from dataclasses import dataclass
from typing import Any, Literal

from areal.api.messages import Row
from areal.trajectory import Tree, export, returns
from areal.trajectory.completion import Completion
from areal.trajectory.message import readable

ExportStyle = Literal["individual", "concat"]


@dataclass(frozen=True)
class Interaction:
    """A conversation up to an answer, and the row that trains it."""

    id: str
    """Of the completion it ends with."""
    messages: list[dict[str, Any]]
    """Every message to the end of the answer; pictures are named, the row has them."""
    reward: float
    """What the answer was given, 0 if nothing; once a discount was applied, with what flowed back to it."""
    given: float
    """Sum of the raw rewards of the completions that the row trains."""
    row: Row


def interactions(
    tree: Tree, style: ExportStyle, turn_discount: float, *, discounted: bool = False
) -> dict[str, Interaction]:
    """The rows of a tree by the id of the completion each ends with; `discounted` says returns in place of rewards."""
    rows = export(tree, style, turn_discount)
    totals = returns(tree, turn_discount)
    ends = _ends(tree, style)
    assert len(ends) == len(rows), "every row ends with a completion"
    return {
        node.id: Interaction(
            id=node.id,
            messages=[readable(message) for message in tree.conversation(node)],
            reward=totals[node.index] if discounted else node.reward or 0.0,
            given=sum(tree.completions[index].reward or 0.0 for index in _trained(row)),
            row=row,
        )
        for node, row in zip(ends, rows, strict=True)
    }


def _ends(tree: Tree, style: ExportStyle) -> list[Completion]:
    """The completion each row ends with, in the order of the rows."""
    inner = {node.parent for node in tree.completions if node.extends} if style == "concat" else set()
    return [node for node in tree.completions if node.index not in inner]


def _trained(row: Row) -> set[int]:
    return set(row.completion_index[row.loss_mask].tolist())
