"""The optimizer steps as torch's own does, and does not load the compiler for it."""

import subprocess
import sys

import pytest
import torch

from areal.engine.training.adamw import AdamW

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def test_it_steps_as_torchs_own_to_the_bit() -> None:
    ours, theirs = (torch.nn.Parameter(torch.randn(100, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    optimizers = AdamW([ours], **SETTINGS), torch.optim.AdamW([theirs], **SETTINGS)
    for seed in range(5):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.randn(100, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        assert torch.equal(ours, theirs)
    assert ours.requires_grad
    for name, moment in optimizers[1].state[theirs].items():
        assert torch.equal(optimizers[0].state[ours][name], moment)


@pytest.mark.slow
def test_training_does_not_load_torchs_compiler() -> None:
    script = (
        "import sys, torch\n"
        "from areal.engine.training.adamw import AdamW\n"
        "weights = torch.nn.Parameter(torch.zeros(3)); weights.grad = torch.ones(3)\n"
        f"AdamW([weights], **{SETTINGS}).step()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
