"""Token sequences with what belongs to them, packed end to end under named keys."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from areal.api.errors import WorkflowError


@dataclass
class SequenceSample:
    """A prompt on its way to an agent, or the trajectories that it returns. `docs/legacy.md` lists the keys of both."""

    ids: list[Hashable]
    """A prompt's is its question's id, the qid."""
    data: dict[str, Any]
    """Tensors, arrays or lists, 1-D."""
    seqlens: dict[str, list[list[int]]] = field(default_factory=dict)
    """By key, for each id: the lengths of its sequences. Only those of `packed_input_ids` are read, the others follow;
    without them there is one sequence."""
    keys: Collection[str] = ()
    """Those of `data`; may be left out."""
    metadata: dict[str, list[Any]] = field(default_factory=dict)
    """For each id. A prompt's has its `task`, the dict from the dataset."""
    dtypes: dict[str, Any] = field(default_factory=dict)
    """Not used: values say it themselves."""
    trailing_shapes: dict[str, Any] = field(default_factory=dict)
    """Not used: values say it themselves."""

    def __post_init__(self) -> None:
        if self.keys and set(self.keys) != set(self.data):
            differing = ", ".join(sorted(set(self.keys) ^ set(self.data)))
            raise WorkflowError(f"keys of a SequenceSample must be those of its data, they differ in {differing}")
        self.keys = set(self.data)

    @property
    def bs(self) -> int:
        return len(self.ids)
