"""Figures of a batch that is computed in parts; each figure declares how its parts combine."""

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import SupportsFloat

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
    """Numbers by name. `Figures(mean={"clip_ratio": 0.1}, total={"tokens": 12}, maximum={"difference": 1e-6})`."""

    def __init__(
        self, *, mean: Values | None = None, total: Values | None = None, maximum: Values | None = None
    ) -> None:
        super().__init__()
        self._kinds: dict[str, Kind] = {}
        for kind, values in ((Kind.MEAN, mean), (Kind.TOTAL, total), (Kind.MAXIMUM, maximum)):
            for name, value in (values or {}).items():
                self[name], self._kinds[name] = float(value), kind

    @classmethod
    def of_passes(cls, parts: Iterable["Figures"]) -> "Figures":
        """The figures of one minibatch from those of its passes."""
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
