"""An objective travels to ranks as values: names of stages, their settings, a user's function by import string."""

import sys
from pathlib import Path

import pytest
import torch

from areal.config.presets import PRESETS, resolve
from areal.config.training import ActorConfig
from areal.engine.sharded.messages import rank_wire
from areal.engine.training.objective import PolicyObjective

FIELDS = {
    "weights": torch.full((3,), 1 / 3),
    "behaviour": torch.tensor([-1.0, -2.0, -0.5]),
    "proximal": torch.tensor([-1.1, -1.9, -0.5]),
    "correction": torch.tensor([0.9, 1.1, 1.0]),
    "advantages": torch.tensor([1.0, -1.0, 0.5]),
    "checkable": torch.tensor([True, True, False]),
    "completions": torch.tensor([4, 4, 5]),
    "completion_tokens": torch.tensor([2, 2, 1]),
}
LOGPROBS = torch.tensor([-0.9, -2.1, -0.6])


def arrived(actor: ActorConfig) -> PolicyObjective:
    sent = PolicyObjective(resolve(actor, reference=True).algorithm, decoupled=True, recomputed=False)
    found = rank_wire().unpack(rank_wire().pack(sent))
    assert found == sent
    assert isinstance(found, PolicyObjective)
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_the_objective_of_a_preset_arrives_as_it_was(name: str) -> None:
    loss, figures = arrived(ActorConfig(algorithm=name))(LOGPROBS.clone().requires_grad_(), FIELDS)
    assert bool(loss.isfinite())
    assert figures.by_kind()["total"]["trained_tokens"] == 3


def test_a_function_of_the_users_arrives_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_objective.py").write_text(
        "def doubled(logprobs, log_ratio, advantages, algorithm):\n    return -2 * advantages * log_ratio.exp()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    objective = arrived(ActorConfig(objective="own_objective.doubled"))
    loss, _ = objective(LOGPROBS, FIELDS)
    ratios = (LOGPROBS - FIELDS["proximal"]).exp()
    expected = (-2 * FIELDS["advantages"] * ratios * FIELDS["correction"]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    sys.modules.pop("own_objective")
