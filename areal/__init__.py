"""Train language-model agents with asynchronous reinforcement learning.

This is the front door: the names below load on first use, so `import areal` costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.infra import workflow_context
    from areal.trainer.ppo import PPOTrainer
    from areal.trainer.sft import SFTTrainer

__version__ = "0.1.0"
__all__ = ["PPOTrainer", "SFTTrainer", "__version__", "workflow_context"]

_HOMES = {
    "PPOTrainer": ("areal.trainer.ppo", "PPOTrainer"),
    "SFTTrainer": ("areal.trainer.sft", "SFTTrainer"),
    "workflow_context": ("areal.infra.workflow_context", None),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    module_name, attribute = _HOMES[name]
    module = import_module(module_name)
    return module if attribute is None else getattr(module, attribute)
