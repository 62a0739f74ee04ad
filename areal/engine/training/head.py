"""From hidden states to log-probs of tokens, with a gradient of their own: how much is held of the logits, how long.

autograd would keep logits, divide them by temperatures of 1 and make three tensors of their size for the gradient of a
log-sum-exp. Here they become exponentials where they are, which are all that the gradient needs: it takes their place.
Where they are many they exist for a piece of the rows at a time, and are computed again for the gradient.

With a log-prob comes the entropy of the distribution that it belongs to, for whoever wants to look: it has no gradient.

A row of logits is computed once, however many tokens are asked of it: samples of one prompt share their first tokens.

Shapes: R rows, D hidden, V vocabulary, N asked tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.messages import Array
from areal.engine.model.device import to_device
from areal.engine.training.token_sets import DrawnFrom

HEAD_ELEMENTS = 1 << 24
"""Logits held at once: rows times vocabulary."""

NO_POWER = -1000.0
"""The exponential of this, and of anything below it, is 0, also in double precision."""

Temperatures: TypeAlias = Tensor | float
"""One for each asked token, or one for all."""


@dataclass(frozen=True)
class Picks:
    """Which of the logits [R,V] are asked for: token `targets[n]` of row `rows[n]`; rows ascend."""

    rows: Tensor
    targets: Tensor
    ends: Array
    """[R+1], on the host: how many tokens are asked for of all rows before each."""

    @classmethod
    def of(cls, rows: Array, targets: Array) -> "Picks":
        counts = np.bincount(rows)
        return cls(torch.from_numpy(rows), torch.from_numpy(targets), np.concatenate(([0], counts.cumsum())))

    @classmethod
    def one_of_each(cls, targets: Tensor) -> "Picks":
        """A token of every row."""
        count = len(targets)
        return cls(torch.arange(count, device=targets.device), targets, np.arange(count + 1))

    def on(self, device: torch.device) -> "Picks":
        return Picks(to_device(self.rows, device), to_device(self.targets, device), self.ends)

    def pieces(self, vocabulary: int) -> "Iterator[tuple[slice, slice, Picks]]":
        """Rows whose logits are held together, the tokens asked of them, and these counted from the first row."""
        size, count = max(1, HEAD_ELEMENTS // vocabulary), len(self.ends) - 1
        for first in range(0, count, size):
            last = min(first + size, count)
            asked = slice(int(self.ends[first]), int(self.ends[last]))
            own = self if size >= count else Picks(self.rows[asked] - first, self.targets[asked], self.ends)
            yield slice(first, last), asked, own


def head_logprobs(
    hidden: Tensor,
    head: Tensor,
    picks: Picks,
    temperatures: Temperatures = 1.0,
    drawn: DrawnFrom | None = None,
    entropies: Tensor | None = None,
) -> Tensor:
    """Log-probs [N] of tokens by hidden states [R,D] and a head [V,D]; in float32 or better.

    Under autocast the products are computed in its dtype. `drawn`: what each token was drawn from; None = everything.
    `entropies` [N] takes those of what each token was drawn from.
    """
    hidden, picks = by_distribution(hidden, picks, temperatures, drawn)
    keep = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    found: Tensor = _HeadLogProbs.apply(hidden, head, picks, temperatures, drawn, entropies, keep)  # type: ignore[no-untyped-call]
    return found


def by_distribution(
    hidden: Tensor, picks: Picks, temperatures: Temperatures, drawn: DrawnFrom | None
) -> tuple[Tensor, Picks]:
    """Rows that have one distribution: a row for each token, if temperatures or what is drawn from may differ."""
    if isinstance(temperatures, Tensor) or drawn is not None:
        return hidden.index_select(0, picks.rows), Picks.one_of_each(picks.targets)
    return hidden, picks


def logits_logprobs(
    logits: Tensor,
    picks: Picks,
    temperatures: Temperatures = 1.0,
    drawn: DrawnFrom | None = None,
    entropies: Tensor | None = None,
) -> Tensor:
    """The same by logits [R,V]; where temperatures differ, or there is `drawn`, one token is asked of each row."""
    found: Tensor = _LogitsLogProbs.apply(logits, picks, temperatures, drawn, entropies)  # type: ignore[no-untyped-call]
    return found


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperatures: Temperatures = 1.0,
    drawn: DrawnFrom | None = None,
    entropies: Tensor | None = None,
) -> Tensor:
    """Log-probs [R] of a token for each row of logits [R,V]."""
    return logits_logprobs(logits, Picks.one_of_each(targets), temperatures, drawn, entropies)


def _softmax(
    logits: Tensor, picks: Picks, temperatures: Temperatures, drawn: DrawnFrom | None, entropies: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [N], and the softmax as exponentials [R,V] and their sums [R].

    The exponentials take the memory of `logits`, which nothing else may use.
    """
    if isinstance(temperatures, Tensor):
        logits.div_(temperatures[:, None])
    elif temperatures != 1.0:
        logits.div_(temperatures)
    if drawn is not None:
        drawn.limit(logits)
    largest = logits.amax(1, keepdim=True)
    picked = logits.view(-1)[_places(logits, picks)]
    shifted = logits.sub_(largest)
    weighted = None if entropies is None else shifted.clamp(min=NO_POWER)  # of -inf, 0 times -inf would be NaN
    powers = shifted.exp_()
    sums = powers.sum(1)
    if entropies is not None and weighted is not None:  # log Σ e^x - Σ x e^x / Σ e^x
        entropies.copy_((sums.log() - weighted.mul_(powers).sum(1) / sums)[picks.rows])
    return picked - (largest.squeeze(1) + sums.log())[picks.rows], powers, sums


def _logits_gradient(powers: Tensor, sums: Tensor, picks: Picks, temperatures: Temperatures, given: Tensor) -> Tensor:
    """[R,V] in the memory of the exponentials, by the gradient [N] of the log-probs.

    A token's log-prob has the gradient 1 at its own logit, less the softmax at all logits of the row.
    """
    of_rows = given.new_zeros(len(sums)).index_add_(0, picks.rows, given)
    given, of_rows = given / temperatures, of_rows / temperatures
    found = powers.mul_((of_rows / sums).neg_()[:, None])
    found.view(-1).index_add_(0, _places(found, picks), given)
    return found


def _places(logits: Tensor, picks: Picks) -> Tensor:
    return picks.targets.add(picks.rows, alpha=logits.shape[1])


class _LogitsLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        picks: Picks,
        temperatures: Temperatures,
        drawn: DrawnFrom | None,
        entropies: Tensor | None,
    ) -> Tensor:
        exact = _exact(logits.dtype)
        own = logits.clone() if logits.dtype == exact else logits.to(exact)
        found, *softmax = _softmax(own, picks, temperatures, drawn, entropies)
        ctx.save_for_backward(*softmax)
        ctx.asked, ctx.dtype = (picks, temperatures), logits.dtype
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        powers, sums = ctx.saved_tensors
        picks, temperatures = ctx.asked
        return _logits_gradient(powers, sums, picks, temperatures, given).to(ctx.dtype), None, None, None, None


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        picks: Picks,
        temperatures: Temperatures,
        drawn: DrawnFrom | None,
        entropies: Tensor | None,
        keep: bool,
    ) -> Tensor:
        ctx.asked, ctx.dtype = (picks, temperatures, drawn), _product_dtype(hidden)
        states, matrix = hidden.to(ctx.dtype), head.to(ctx.dtype)
        found: list[Tensor] = []
        softmax: list[Tensor] = []
        for rows, asked, own in picks.pieces(len(head)):
            softmax.clear()  # that of a piece, before there are the logits of the next
            logits = _logits(states[rows], matrix)
            logprobs, *softmax = _softmax(
                logits,
                own,
                of_rows(temperatures, rows),
                drawn and drawn[rows],
                None if entropies is None else entropies[asked],
            )
            del logits  # which the softmax has taken
            found.append(logprobs)
        ctx.save_for_backward(hidden, head, *(softmax if keep and len(found) == 1 else ()))
        return found[0] if len(found) == 1 else torch.cat(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        hidden, head, *kept = ctx.saved_tensors
        picks, temperatures, drawn = ctx.asked
        states, matrix = hidden.to(ctx.dtype), head.to(ctx.dtype)
        of_states, of_head = torch.empty_like(states), None
        learned = ctx.needs_input_grad[1]
        for rows, asked, own in picks.pieces(len(head)):
            at = of_rows(temperatures, rows)
            powers, sums = kept or _softmax(_logits(states[rows], matrix), own, at, drawn and drawn[rows])[1:]
            of_logits = _logits_gradient(powers, sums, own, at, given[asked]).to(ctx.dtype)
            of_states[rows] = of_logits @ matrix
            if learned:
                of_head = _added(of_head, of_logits.t(), states[rows], head.dtype)
            del powers, of_logits  # before there are the logits of the next piece
        return of_states.to(hidden.dtype), of_head, None, None, None, None, None


def of_rows(temperatures: Temperatures, rows: slice) -> Temperatures:
    return temperatures[rows] if isinstance(temperatures, Tensor) else temperatures


def _logits(states: Tensor, matrix: Tensor) -> Tensor:
    logits = F.linear(states, matrix)
    return logits.to(_exact(logits.dtype))


def _added(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`total` + left @ right, in `dtype` whatever the product is computed in."""
    if total is None:
        return (left @ right).to(dtype)
    return total.addmm_(left, right) if left.dtype == dtype else total.add_(left @ right)


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """What matrix products are computed in here."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _exact(dtype: torch.dtype) -> torch.dtype:
    """In which sums of exponentials are taken."""
    return torch.promote_types(dtype, torch.float32)
