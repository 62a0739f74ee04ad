"""A run trains an adapter on vLLM, with top_k and top_p: only the adapter is published, and both sides agree."""

from pathlib import Path

import pytest
from real_runs import COMPARED, CONFIG, SCRIPT, SMALL, Run, rows_of, sides_agree, summary_of
from vllm_engines import PYTHON, START_SECONDS

STEPS = 3


def test_an_adapter_is_trained_on_vllm_under_top_k_and_top_p(
    tmp_path: Path, tiny_math: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = [
        "trial_name=one",
        f"total_train_steps={STEPS}",
        "actor.lora.rank=4",
        "actor.optimizer.lr=1e-2",
        "gconfig.top_k=20",
        "gconfig.top_p=0.95",
        "rollout.max_head_offpolicyness=0",  # every step is trained on what the adapter of the step before has drawn
        "rollout.backend=vllm",
        f"rollout.python={PYTHON}",
        "rollout.engine_args=[--enforce-eager]",
    ]
    run = Run([SCRIPT, "--config", CONFIG, *SMALL, *COMPARED, *settings], tmp_path)
    try:
        assert run.wait(START_SECONDS + 240) == 0, run.text
    finally:
        run.end()
    run_dir = tmp_path / "runs/sort-digits/one"
    steps = [row for row in rows_of(run_dir / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    rollouts = rows_of(run_dir / "rollouts.jsonl")
    assert len(rollouts) == STEPS * 4 * 4
    assert max(rollout["version_max"] for rollout in rollouts) == STEPS - 1
    summary = summary_of(run_dir)
    print(f"engine and trainer differ by {summary['max_logprob_difference']:.1e} at most")
    assert sides_agree(summary)
    assert (run_dir / f"checkpoints/step-{STEPS:06}/adapter_model.safetensors").exists()
