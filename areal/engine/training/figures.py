"""Figures of a batch that is computed in parts; each figure declares how its parts combine."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import SupportsFloat

import torch
from torch import Tensor

from areal.engine.model.device import to_host

Values = Mapping[str, SupportsFloat]
"""Numbers or tensors of one element, by name."""


class Kind(Enum):
    MEAN = auto()
    """A mean whose weights sum to 1 over a minibatch: its passes add up, minibatches are averaged."""
    TOTAL = auto()
    """Passes and minibatches add up."""
    MAXIMUM = auto()
    """The largest of all parts."""


class Figures(dict[str, float]):
    """Numbers by name. `Figures(mean={"clip_ratio": 0.1}, total={"tokens": 12}, maximum={"difference": 1e-6})`.

    A tensor becomes a number when parts are combined, with those of all other parts: reading one at a time would make
    the host wait for the device in the middle of a batch.
    """

    def __init__(
        self, *, mean: Values | None = None, total: Values | None = None, maximum: Values | None = None
    ) -> None:
        super().__init__()
        self._kinds: dict[str, Kind] = {}
        self._unread: dict[str, Tensor] = {}
        for kind, values in ((Kind.MEAN, mean), (Kind.TOTAL, total), (Kind.MAXIMUM, maximum)):
            for name, value in (values or {}).items():
                self._kinds[name] = kind
                if isinstance(value, Tensor):
                    self._unread[name] = value.detach()
                else:
                    self[name] = float(value)

    def by_kind(self) -> dict[str, dict[str, float]]:
        """What `Figures(**…)` makes the same of, in plain values, for another process."""
        _read([self])
        return {
            kind.name.lower(): {name: value for name, value in self.items() if self._kinds[name] is kind}
            for kind in Kind
        }

    def under(self, prefix: str) -> "Figures":
        """The same figures with names that begin with `prefix`."""
        kinds = {
            kind: {f"{prefix}{name}": value for name, value in values.items()}
            for kind, values in self.by_kind().items()
        }
        return Figures(**kinds)

    @classmethod
    def of_passes(cls, parts: Iterable["Figures"]) -> "Figures":
        """The figures of one minibatch from those of its passes."""
        parts = list(parts)
        _read(parts)
        whole = cls()
        for part in parts:
            for name, value in part.items():
                kind = whole._kinds.setdefault(name, part._kinds[name])
                if name not in whole:
                    whole[name] = value
                else:
                    whole[name] = max(whole[name], value) if kind is Kind.MAXIMUM else whole[name] + value
        return whole

    @classmethod
    def of_minibatches(cls, parts: Iterable["Figures"]) -> "Figures":
        """The figures of one step; a mean is taken over the minibatches that have the figure."""
        parts = list(parts)
        whole = cls.of_passes(parts)
        for name, kind in whole._kinds.items():
            if kind is Kind.MEAN:
                whole[name] /= sum(name in part for part in parts)
        return whole


def _read(parts: Sequence[Figures]) -> None:
    """Turn all tensors into numbers, with one copy from their device."""
    unread = [(part, name, value) for part in parts for name, value in part._unread.items()]
    if not unread:
        return
    (values,) = to_host(torch.stack([value.float() for _, _, value in unread]))
    for (part, name, _), value in zip(unread, values.tolist(), strict=True):
        part[name] = value
    for part in parts:
        part._unread.clear()
