"""The frameworks that `make test-frameworks` trains agents of, and the table that it ends with.

Each has an agent in `tests/framework_agents`, which docs/more-frameworks.md prints. As a script this file reads the
JUnit files that pytest left in each environment, prints what became of each framework, and fails unless all trained.
"""

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from calculator_task import CALL

AGENTS = Path(__file__).parent / "framework_agents"
STEPS = 2
"""So many are trained of each framework: the second with weights that the first has changed."""
QUIET = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else its import asks the network for a list of prices
}
"""Environment variables by which these frameworks leave the network alone."""


@dataclass(frozen=True)
class Framework:
    name: str
    library: str
    """The module without which its agent cannot be made."""
    distribution: str
    """The package whose version counts."""
    says: tuple[str, ...] = (CALL, "7")
    """What a model says in turn that solves `SUM` with it."""
    keeps_the_conversation: bool = True
    """False = it writes what was said as new text, so its calls do not continue each other's tokens."""

    @property
    def module(self) -> str:
        return f"{self.name.replace('-', '_')}_agent"

    @property
    def agent(self) -> str:
        """The name of its class."""
        return "".join(word.capitalize() for word in self.module.split("_"))


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def fielded(**fields: str) -> str:
    """Named fields as DSPy writes them."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in {**fields, "completed": ""}.items())


FRAMEWORKS = (
    Framework("smolagents", "smolagents", "smolagents", (CALL, called("final_answer", answer="7"))),
    Framework("autogen", "autogen_agentchat", "autogen-agentchat"),
    Framework("litellm", "litellm", "litellm", ("7",)),
    Framework(
        "dspy",
        "dspy",
        "dspy",
        (
            fielded(next_thought="Add.", next_tool_name="add", next_tool_args='{"a": 3, "b": 4}'),
            fielded(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
            fielded(reasoning="A sum.", answer="7"),
        ),
        False,
    ),
    Framework("llama-index", "llama_index.llms.openai_like", "llama-index-llms-openai-like"),
    Framework("google-adk", "google.adk", "google-adk"),
    Framework("strands", "strands", "strands-agents"),
    Framework("haystack", "haystack", "haystack-ai"),
    Framework("instructor", "instructor", "instructor", (called("Answer", value="7"),)),
    Framework("crewai", "crewai", "crewai"),
)


@dataclass(frozen=True)
class Outcome:
    version: str = "-"
    steps: str = "-"
    result: str = "not run"


def outcomes(reports: Iterable[Path]) -> dict[str, Outcome]:
    """What the training tests in JUnit files say of each framework; one that was skipped counts as not run."""
    found: dict[str, Outcome] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            noted = {each.get("name"): each.get("value") or "-" for each in case.iter("property")}
            if "framework" in noted and case.find("skipped") is None:
                failed = case.find("failure") is not None or case.find("error") is not None
                result = "failed" if failed else "trained"
                found[noted["framework"]] = Outcome(noted.get("version", "-"), noted.get("steps", "-"), result)
    return found


def table(found: dict[str, Outcome]) -> str:
    rows = [("framework", "version", "steps", "result")]
    for framework in FRAMEWORKS:
        outcome = found.get(framework.name, Outcome())
        rows.append((framework.name, outcome.version, outcome.steps, outcome.result))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    results = outcomes(path for path in map(Path, sys.argv[1:]) if path.exists())
    print(table(results))
    sys.exit(any(results.get(each.name, Outcome()).result != "trained" for each in FRAMEWORKS))
