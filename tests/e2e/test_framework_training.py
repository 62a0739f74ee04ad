"""The example trains the agents of every framework: only `workflow=` changes."""

from pathlib import Path

import pytest
from real_runs import COMPARED, Start, rows_of, sides_agree, summary_of

AGENTS = [
    ("agents", "openai.math_agent.ResponsesMathToolAgent"),
    ("langchain_openai", "langchain.math_agent.MathAgent"),
    ("langgraph", "langgraph.math_agent.MathToolAgent"),
    ("anthropic", "anthropic.math_agent.MathToolAgent"),
    ("pydantic_ai", "pydantic_ai.math_agent.MathToolAgent"),
    ("camel", "camel.math_agent.MathToolAgent"),
]
"""A framework's module, and the agent; `openai` and its Agents SDK over chat are in test_example.py."""


@pytest.mark.parametrize(("library", "agent"), AGENTS, ids=[library for library, _ in AGENTS])
def test_agent_of_a_framework_trains_by_changing_only_the_workflow(
    example: Start, run_dir: Path, library: str, agent: str
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed; CAMEL has `make test-camel`")
    run = example(
        f"workflow=areal.workflow.{agent}",
        *("total_train_steps=2", "train_dataset.batch_size=2", "gconfig.n_samples=2", "valid_dataset.path="),
        *COMPARED,
    )
    assert run.wait() == 0, run.text
    summary = summary_of(run_dir)
    assert summary["steps"] == 2
    assert summary["rejections"] == {}, run.text
    assert sides_agree(summary)
    assert len(rows_of(run_dir / "rollouts.jsonl")) == 2 * 2 * 2
