"""The weights of a transformers model by the names, and in the shapes, that its files have.

transformers holds the experts of a layer in two large parameters; files have three small matrices for each expert.
Weights are published and saved as files have them, so that every reader of such files reads them: vLLM, SGLang, the
embedded engine, `from_pretrained`. Parts of a parameter are views of it: to write into them is to change the model.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FileLayout:
    def __init__(self, module: Any) -> None:
        self._stored = _as_stored(module)
        self._changed: set[str] = set()
        """Parameters that files have by other names, or in parts."""
        if self._stored is not None:
            self._changed = self._find_changed(dict(module.named_parameters()))

    def parts(self, name: str, parameter: Tensor) -> Iterable[tuple[str, Tensor]]:
        """What a parameter is in files. Most are one tensor, by their own name."""
        return self._reverted({name: parameter}).items() if name in self._changed else [(name, parameter)]

    def shapes(self, name: str, shape: torch.Size) -> Iterable[tuple[str, Tensor]]:
        """The same of a parameter of which only the shape is known; tensors have no values."""
        return self.parts(name, torch.empty(shape, device="meta"))

    def _find_changed(self, parameters: dict[str, Tensor]) -> set[str]:
        """None if one parameter is not enough to make what it is in files, such as three that files have as one."""
        bare = {name: torch.empty(parameter.shape, device="meta") for name, parameter in parameters.items()}
        parts = {name: self._reverted({name: tensor}) for name, tensor in bare.items()}
        one_by_one = {name: part.shape for found in parts.values() for name, part in found.items()}
        together = {name: part.shape for name, part in self._reverted(bare).items()}
        if one_by_one != together or not all(_are_views(parts[name].values(), bare[name]) for name in bare):
            return set()
        return {name for name, found in parts.items() if [*found] != [name]}

    def _reverted(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        with torch.no_grad(), _Views():
            parts: dict[str, Tensor] = revert_weight_conversion(self._stored, parameters)
        return parts


def _are_views(parts: Iterable[Tensor], whole: Tensor) -> bool:
    return all(part.untyped_storage()._cdata == whole.untyped_storage()._cdata for part in parts)


def _as_stored(module: Any) -> Any:
    """What transformers' conversion asks of a model; None = files have its parameters as they are.

    The conversion is that of the architecture, not the one that a directory happened to need when it was read: the
    trainer and an engine that was opened without weights must come to the same names.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    found = [
        each for each in get_model_conversion_mapping(module, add_legacy=False) if not isinstance(each, PrefixChange)
    ]
    if not any(isinstance(each, WeightConverter) for each in found):
        return None
    return SimpleNamespace(_weight_conversions=found, config=module.config)


class _Views(TorchFunctionMode):
    """transformers makes contiguous copies of the parts of a tensor; without them they stay views of it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is Tensor.contiguous else function(*args, **(kwargs or {}))
