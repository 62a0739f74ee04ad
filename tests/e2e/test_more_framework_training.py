"""The agents of docs/more-frameworks.md train two steps each; `make test-frameworks` makes its table of these tests."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from more_frameworks import AGENTS, FRAMEWORKS, QUIET, STEPS, Framework
from real_runs import COMPARED, Start, rows_of, sides_agree, summary_of

SECONDS = 1200.0
"""The driver and the worker load a framework first, which takes some of them ten seconds of processor time."""


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=[framework.name for framework in FRAMEWORKS])
def test_agent_trains_two_steps(
    example: Start,
    run_dir: Path,
    framework: Framework,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip(framework.library, reason=f"{framework.name} is not installed; use make test-frameworks")
    record_property("framework", framework.name)
    record_property("version", version(framework.distribution))
    monkeypatch.setenv("PYTHONPATH", str(AGENTS))
    run = example(
        f"workflow={framework.module}.{framework.agent}",
        *(f"total_train_steps={STEPS}", "train_dataset.batch_size=2", "gconfig.n_samples=2", "valid_dataset.path="),
        "rollout.agent.timeout_seconds=300",
        *COMPARED,
    )
    assert run.wait(SECONDS) == 0, run.text
    summary = summary_of(run_dir)
    record_property("steps", summary["steps"])
    assert summary["steps"] == STEPS
    assert summary["rejections"] == {}, run.text
    assert sides_agree(summary)
    assert len(rows_of(run_dir / "rollouts.jsonl")) == STEPS * 2 * 2
