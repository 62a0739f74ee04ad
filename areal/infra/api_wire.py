"""The wire of a run: every message type of `areal.api`. A type that is to travel is added here."""

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse
from areal.api.messages import Episode, GroupResult, GroupTask, Rejection, Row, Stall
from areal.config.generation import GenerationHyperparameters
from areal.infra.wire import Wire

MESSAGE_TYPES = (
    EngineHealth,
    Episode,
    GenerationHyperparameters,
    Grammar,
    GroupResult,
    GroupTask,
    ModelRequest,
    ModelResponse,
    Rejection,
    Row,
    Stall,
    WeightUpdate,
)


def api_wire() -> Wire:
    """A wire for all of them; a request leaves its tokenizer at home."""
    return Wire(MESSAGE_TYPES, omit={ModelRequest: ("tokenizer",)})
