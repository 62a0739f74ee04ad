"""The types that travel between the processes of a run. How values become bytes: `areal/utils/wire.py`."""

from areal.api.engine_api import Canary, EngineHealth, WeightShard, WeightUpdate
from areal.api.errors import RejectReason
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse, TokenChunk
from areal.api.messages import Doing, EngineAddress, Episode, GroupResult, GroupTask, Node, Rejection, Row, Stall
from areal.config.rollout import GenerationHyperparameters
from areal.utils.wire import Wire

__all__ = ["MESSAGE_TYPES", "Wire", "api_wire"]

MESSAGE_TYPES = (
    Canary,
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
    TokenChunk,
    WeightShard,
    WeightUpdate,
)
"""Every type that travels between the processes of a run as itself; a `WorkerSetup` and user objects travel as bytes,
which their sender has pickled."""


def api_wire() -> Wire:
    """A wire for the messages of a run; a request travels without its tokenizer."""
    return Wire(MESSAGE_TYPES, omit={ModelRequest: ("tokenizer",)})
