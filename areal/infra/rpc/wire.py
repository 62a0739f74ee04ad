"""The types that travel between the processes of a run. How values become bytes: `areal/utils/wire.py`."""

from dataclasses import fields
from itertools import islice
from operator import attrgetter
from typing import Any

from areal.api.engine_api import Canary, EngineHealth, WeightShard, WeightUpdate
from areal.api.errors import RejectReason
from areal.api.io_struct import Choices, Grammar, ModelRequest, ModelResponse, Steering, TokenChunk
from areal.api.messages import Doing, EngineAddress, Episode, GroupResult, GroupTask, Node, Rejection, Row, Stall
from areal.config.rollout import GenerationHyperparameters
from areal.utils.columns import join, split
from areal.utils.wire import Wire

__all__ = ["MESSAGE_TYPES", "Wire", "api_wire"]

MESSAGE_TYPES = (
    Canary,
    Choices,
    Doing,
    EngineAddress,
    EngineHealth,
    Episode,
    GenerationHyperparameters,
    Grammar,
    GroupResult,
    GroupTask,
    ModelRequest,
    ModelResponse,
    Node,
    RejectReason,
    Rejection,
    Row,
    Stall,
    Steering,
    TokenChunk,
    WeightShard,
    WeightUpdate,
)
"""Every type that travels between the processes of a run as itself; a `WorkerSetup` and user objects travel as bytes,
which their sender has pickled."""


_ROW_FIELDS = tuple(field.name for field in fields(Row))
_ROW = attrgetter(*_ROW_FIELDS)
_EPISODE_FIELDS = tuple(field.name for field in fields(Episode) if field.name != "rows")
_EPISODE = attrgetter(*_EPISODE_FIELDS)
_GROUP_FIELDS = tuple(field.name for field in fields(GroupResult) if field.name != "episodes")
_GROUP = attrgetter(*_GROUP_FIELDS)


def _take_group_apart(group: GroupResult) -> list[Any]:
    """The rows of all its episodes field by field: seven small arrays for each would take longer to pack and to build
    than everything else in them."""
    rows = [_ROW(row) for episode in group.episodes for row in episode.rows]
    columns = [join(list(values)) for values in zip(*rows, strict=True)]
    episodes = [[len(episode.rows), *_EPISODE(episode)] for episode in group.episodes]
    return [columns, episodes, *_GROUP(group)]


def _build_group(values: list[Any]) -> GroupResult:
    if len(values) != 2 + len(_GROUP_FIELDS):
        raise TypeError(f"a GroupResult travels as {2 + len(_GROUP_FIELDS)} values, received {len(values)}")
    columns, episodes, *rest = values
    if columns and len(columns) != len(_ROW_FIELDS):
        raise TypeError(f"Row has the fields {list(_ROW_FIELDS)}, received {len(columns)} columns")
    rows = [Row(*each) for each in zip(*map(split, columns), strict=True)]
    if any(len(each) != 1 + len(_EPISODE_FIELDS) for each in episodes):
        raise TypeError(f"Episode has the fields {list(_EPISODE_FIELDS)} beside its rows, received others")
    counts = [each[0] for each in episodes]
    if sum(counts) != len(rows):
        raise ValueError(f"episodes of {counts} rows cannot be made of {len(rows)}")
    left = iter(rows)
    built = [Episode(list(islice(left, count)), *own) for count, *own in episodes]
    return GroupResult(episodes=built, **dict(zip(_GROUP_FIELDS, rest, strict=True)))


def api_wire() -> Wire:
    """A wire for the messages of a run; a request travels without its tokenizer, an answer without its prompt."""
    return Wire(
        MESSAGE_TYPES,
        omit={ModelRequest: ("tokenizer",), ModelResponse: {"input_tokens": list}},
        forms={GroupResult: (_take_group_apart, _build_group)},
    )
