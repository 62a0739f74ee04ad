"""Train language-model agents with asynchronous reinforcement learning.

The names below load on first use, so that `import areal` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.infra import workflow_context
    from areal.trainer.preference import DPOTrainer, RewardTrainer
    from areal.trainer.sft import SFTTrainer
    from areal.trainer.trainers import PPOTrainer

__version__ = "0.1.0"
__all__ = ["DPOTrainer", "PPOTrainer", "RewardTrainer", "SFTTrainer", "__version__", "workflow_context"]

_DEFINED_IN = {
    "DPOTrainer": ("areal.trainer.preference", "DPOTrainer"),
    "PPOTrainer": ("areal.trainer.trainers", "PPOTrainer"),
    "RewardTrainer": ("areal.trainer.preference", "RewardTrainer"),
    "SFTTrainer": ("areal.trainer.sft", "SFTTrainer"),
    "workflow_context": ("areal.infra.workflow_context", None),
}


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    module_name, attribute = _DEFINED_IN[name]
    module = import_module(module_name)
    return module if attribute is None else getattr(module, attribute)
