"""What the direct client exports: each conversation with its row, to be returned by a RolloutWorkflow."""

from dataclasses import dataclass, field

from areal.api.messages import Node, Row
from areal.trajectory.export import ExportStyle, export, nodes_of, row_ends
from areal.trajectory.message import Message, readable
from areal.trajectory.rewards import returns
from areal.trajectory.tree import Tree


@dataclass(frozen=True)
class Interaction:
    """A conversation up to an answer, and the row that trains it."""

    id: str
    """Of the completion it ends with."""
    messages: list[Message]
    """Every message to the end of the answer; images are described, the row has them."""
    reward: float
    """What the answer was given, 0 if nothing; once a discount was applied, with what flowed back to it."""
    given: float
    """Sum of the raw rewards of the completions that the row trains."""
    row: Row
    nodes: list[Node] = field(default_factory=list)
    """The whole tree that it was exported from: one list for all of one export. Empty = there is none."""


def interactions(
    tree: Tree, style: ExportStyle, turn_discount: float, *, discounted: bool = False
) -> dict[str, Interaction]:
    """The rows of a tree by the id of the completion each ends with; `discounted` = report returns, not rewards."""
    totals = returns(tree, turn_discount)
    rows, nodes = export(tree, style, turn_discount), nodes_of(tree)
    return {
        node.id: Interaction(
            id=node.id,
            messages=[readable(message) for message in tree.conversation(node)],
            reward=totals[node.index] if discounted else node.reward or 0.0,
            given=sum(tree.completions[index].reward or 0.0 for index in _trained(row)),
            row=row,
            nodes=nodes,
        )
        for node, row in zip(row_ends(tree, style), rows, strict=True)
    }


def _trained(row: Row) -> set[int]:
    return set(row.completion_index[row.loss_mask].tolist())
