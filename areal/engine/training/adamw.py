"""torch's AdamW without torch's compiler, which it loads at its first use and never needs here.

That takes as long as to load all the rest of torch, in every process that trains.
"""

from inspect import unwrap
from typing import Any

import torch


class AdamW(torch.optim.AdamW):
    """Computes what torch's does, to the bit: these are its own methods, without what hides them from the compiler."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return unwrap(torch.optim.AdamW.step)(self, closure)
