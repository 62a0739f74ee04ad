"""What one episode is: workflows in tokens, and example agents that speak to the model over HTTP.

Refuses to know who runs episodes (rollout/) and which engine or proxy is behind them. The names below load on first
use: agents live in this room too, and run in processes that need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.workflow.multi_turn import MultiTurnWorkflow
    from areal.workflow.rlvr import RLVRWorkflow
    from areal.workflow.vision_rlvr import VisionRLVRWorkflow

__all__ = ["MultiTurnWorkflow", "RLVRWorkflow", "VisionRLVRWorkflow"]

_HOMES = {
    "MultiTurnWorkflow": "areal.workflow.multi_turn",
    "RLVRWorkflow": "areal.workflow.rlvr",
    "VisionRLVRWorkflow": "areal.workflow.vision_rlvr",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal.workflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
