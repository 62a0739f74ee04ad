"""How the figures of a batch follow from those of its parts."""

import pytest
import torch

from areal.engine.training.figures import Figures


def part(loss: float, tokens: int, difference: float) -> Figures:
    return Figures(mean={"loss": torch.tensor(loss)}, total={"seen": tokens}, maximum={"difference": difference})


def test_passes_add_up_but_for_a_maximum() -> None:
    assert Figures.of_passes([part(0.25, 3, -2.0), part(0.5, 4, -1.0)]) == {"loss": 0.75, "seen": 7, "difference": -1}


def test_only_means_are_averaged_over_minibatches_and_only_over_those_that_have_them() -> None:
    whole = Figures.of_minibatches([part(0.25, 3, 2.0), part(0.75, 4, 1.0), Figures(total={"seen": 1})])
    assert whole == {"loss": pytest.approx(0.5), "seen": 8, "difference": 2.0}


def test_kinds_survive_from_passes_to_minibatches() -> None:
    minibatch = Figures.of_passes([part(0.5, 1, 3.0), part(0.5, 1, 1.0)])
    assert Figures.of_minibatches([minibatch, minibatch]) == {"loss": 1.0, "seen": 4, "difference": 3.0}
