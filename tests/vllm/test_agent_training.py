"""The example agent trains on vLLM: only the backend differs from the README's run."""

from pathlib import Path

import pytest
from real_runs import COMPARED, CONFIG, SCRIPT, SMALL, Run, rows_of, sides_agree, summary_of
from vllm_engines import PYTHON, START_SECONDS

STEPS = 5


def test_example_agent_trains_on_vllm(tmp_path: Path, tiny_math: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = [
        "trial_name=one",
        f"total_train_steps={STEPS}",
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
    assert any(row["reward"] > 0 for row in steps)
    rollouts = rows_of(run_dir / "rollouts.jsonl")
    assert len(rollouts) == STEPS * 4 * 4
    assert max(rollout["version_max"] for rollout in rollouts) >= 1
    summary = summary_of(run_dir)
    print(f"engine and trainer differ by {summary['max_logprob_difference']:.1e} at most")
    assert sides_agree(summary)
