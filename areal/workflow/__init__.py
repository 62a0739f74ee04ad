"""What one episode is: workflows that exchange tokens with the engine, and example agents that use the model over HTTP.

Refuses to know who runs episodes (rollout/) and which engine or proxy serves them. The names below load on first use:
the agents of this package run in processes that need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.workflow.gymnasium_text import GymnasiumWorkflow
    from areal.workflow.harbor import HarborWorkflow
    from areal.workflow.multi_turn import MultiTurnWorkflow
    from areal.workflow.openenv import OpenEnvWorkflow
    from areal.workflow.rlvr import RLVRWorkflow
    from areal.workflow.verifiers import VerifiersWorkflow
    from areal.workflow.vision_rlvr import VisionRLVRWorkflow

__all__ = [
    "GymnasiumWorkflow",
    "HarborWorkflow",
    "MultiTurnWorkflow",
    "OpenEnvWorkflow",
    "RLVRWorkflow",
    "VerifiersWorkflow",
    "VisionRLVRWorkflow",
]

_MODULES = {
    "GymnasiumWorkflow": "areal.workflow.gymnasium_text",
    "HarborWorkflow": "areal.workflow.harbor",
    "MultiTurnWorkflow": "areal.workflow.multi_turn",
    "OpenEnvWorkflow": "areal.workflow.openenv",
    "RLVRWorkflow": "areal.workflow.rlvr",
    "VerifiersWorkflow": "areal.workflow.verifiers",
    "VisionRLVRWorkflow": "areal.workflow.vision_rlvr",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'areal.workflow' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
