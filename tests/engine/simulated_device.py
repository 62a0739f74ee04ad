"""A device `sim` that torch takes for an accelerator and that computes on the CPU, for machines without a GPU.

A tensor on it is a wrapper around a CPU tensor. Operations reach `_compute`, which takes the wrappers off, computes,
and puts them on again. It is stricter than a GPU: tensors of `sim` and of the CPU meet only in a copy, index tensors
and tensors of one element included, and whole tensors are read only after a copy to the host. It cannot be removed from
a process again, so it belongs into one of its own (`simulated_round.py`).
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

CPU = torch.device("cpu")
SIM = torch.device("privateuseone", 0)
"""Its name is `sim` once it is installed."""
aten = torch.ops.aten

_COPIES = {aten.copy_.default, aten._to_copy.default, aten._copy_from.default}
"""What may take tensors of both devices."""

crossings: Counter[str] = Counter()
"""Copies `to the host`, single numbers included, and `to the device`, since the last `clear`."""


class MixedDevices(RuntimeError):
    """An operation was given tensors of both devices."""


class SimTensor(torch.Tensor):
    inner: torch.Tensor
    """What it computes with, on the CPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "SimTensor":
        made: SimTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=SIM,
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"sim({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = func.decompose(*args, **(kwargs or {}))  # in inference mode composite operations come here whole
        return _compute(func, *args, **(kwargs or {})) if parts is NotImplemented else parts


def _compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    ours = [each for each in tensors if isinstance(each, SimTensor)]
    if ours and len(ours) < len(tensors) and func not in _COPIES:
        raise MixedDevices(f"{func} was given tensors of sim and of the CPU: {[tuple(each.shape) for each in tensors]}")
    crossings["to the host"] += func is aten._local_scalar_dense.default
    known = {id(each.inner): each for each in ours}

    def unwrapped(value: Any) -> Any:
        if isinstance(value, SimTensor):
            return value.inner
        return CPU if isinstance(value, torch.device) else value

    made = func(*pytree.tree_map(unwrapped, args), **pytree.tree_map(unwrapped, kwargs))
    if func in _COPIES:
        return _copied(func, args, kwargs, made)

    def wrapped(value: torch.Tensor) -> torch.Tensor:
        """What was changed in place is the tensor that was given; a view of a parameter is no inference tensor."""
        if id(value) in known:
            return known[id(value)]
        with torch.inference_mode(value.is_inference()):
            return SimTensor(value)

    return pytree.tree_map_only(torch.Tensor, wrapped, made)


def _copied(func: Any, args: Any, kwargs: Any, made: Any) -> Any:
    """Count the copy if it crosses; its result is where it was asked to be."""
    if func is aten._to_copy.default:
        source, target = args[0], kwargs.get("device")
        there = isinstance(source, SimTensor) if target is None else torch.device(target).type != CPU.type
        made = SimTensor(made) if there else made
    else:
        target, source = args[:2] if func is aten.copy_.default else reversed(args[:2])
        there, made = isinstance(target, SimTensor), target
    if isinstance(source, SimTensor) != there:
        crossings["to the device" if there else "to the host"] += 1
    return made


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of a backend's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def install() -> None:
    """Make `sim` known to torch, for the rest of the process."""
    backend_registration._setup_privateuseone_for_python_backend("sim", backend_module=_Backend())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_compute, "PrivateUse1")  # what has no tensor argument: torch.zeros(2, device="sim")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    products = torch.library.Library("aten", "IMPL")
    for name in _PRODUCTS:
        products.impl(name, _in_autocast_dtype(getattr(aten, name)), "AutocastPrivateUse1")
    _KEPT.extend((library, products))
    _TensorThere().__enter__()
    # The backward pass of an unknown device would run in a thread of its own, which has no Python dispatch.
    torch.autograd.set_multithreading_enabled(False).__enter__()


_KEPT: list[Any] = []
"""A library is forgotten with its object."""


_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention", "conv2d")
"""What other devices compute in the lower precision under autocast."""


def _in_autocast_dtype(func: Any) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        def cast(value: torch.Tensor) -> torch.Tensor:
            return value.to(torch.get_autocast_dtype("sim")) if value.is_floating_point() else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return func(*pytree.tree_map_only(torch.Tensor, cast, args), **kwargs)

    return compute


class _TensorThere(TorchFunctionMode):
    """`torch.tensor(data, device="sim")` in two steps: within it, no Python code could make the copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.tensor or kwargs.get("device") is None:
            return func(*args, **kwargs)
        device = kwargs.pop("device")
        return func(*args, **kwargs).to(device)
