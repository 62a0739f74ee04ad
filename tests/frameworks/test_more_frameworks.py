"""The agents of docs/more-frameworks.md, with the real libraries: what they say is recorded token by token.

`make test-frameworks` installs the libraries; elsewhere the tests of those that are missing are skipped.
"""

import asyncio
import re
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import more_frameworks
import pytest
from calculator_task import CALL, SUM
from more_frameworks import AGENTS, FRAMEWORKS, QUIET, Framework, Outcome, called, outcomes, table

PAGE = Path(__file__).parents[2] / "docs/more-frameworks.md"

# Other people's libraries load in each of these; some take ten seconds of processor time.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=FRAMEWORKS, ids=[framework.name for framework in FRAMEWORKS])
def framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Framework:
    chosen: Framework = request.param
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip(chosen.library, reason=f"{chosen.name} is not installed; use make test-frameworks")
    monkeypatch.syspath_prepend(AGENTS)
    return chosen


def agent_of(framework: Framework) -> Any:
    return getattr(import_module(framework.module), framework.agent)()


def keywords_of(agent: Any, offered: dict[str, Any]) -> dict[str, Any]:
    """As a run does it: an agent gets what it names."""
    named = signature(agent.run).parameters
    return {name: value for name, value in offered.items() if name in named}


async def test_calls_are_recorded_exactly_and_the_right_answer_is_rewarded(stage: Any, framework: Framework) -> None:
    agent, said = agent_of(framework), iter(framework.says)
    async with stage(lambda prompt: next(said)) as s:
        reward = await agent.run(SUM, **keywords_of(agent, s.kwargs()))
        nodes = s.session.tree.completions
        assert reward in (1.0, {nodes[-1].id: 1.0})
        assert len(nodes) == len(framework.says)
        s.check_tokens()
        if framework.keeps_the_conversation:
            s.check_one_conversation(len(framework.says))
        else:
            assert not any(node.extends for node in nodes)


async def test_a_wrong_answer_is_not_rewarded(stage: Any, framework: Framework) -> None:
    agent, said = agent_of(framework), iter([*framework.says[:-1], framework.says[-1].replace("7", "8")])
    async with stage(lambda prompt: next(said)) as s:
        reward = await agent.run(SUM, **keywords_of(agent, s.kwargs()))
        assert reward in (0.0, {s.session.tree.completions[-1].id: 0.0})
        s.check_tokens()


@pytest.mark.parametrize("said", ["", "gibberish", called("fly", a="3"), CALL], ids=repr)
async def test_what_the_model_does_wrong_is_a_wrong_answer(stage: Any, framework: Framework, said: str) -> None:
    """Nothing at all, no format, a tool that is not there, and a tool called for ever."""
    agent = agent_of(framework)
    async with stage(lambda prompt: said, constrained=False) as s:
        reward = await agent.run(SUM, **keywords_of(agent, s.kwargs()))
        nodes = s.session.tree.completions
        assert reward in (0.0, {nodes[0].id: 0.0})
        assert 1 <= len(nodes) <= 8
        s.check_tokens()


async def test_episodes_run_at_the_same_time_without_mixing(stage: Any, framework: Framework) -> None:
    agent = agent_of(framework)
    async with stage(lambda prompt: framework.says[-1]) as s:
        sessions = [s.proxy.open_session() for _ in range(3)]
        offered = [{**s.kwargs(), "base_url": each.base_url, "api_key": each.api_key} for each in sessions]
        await asyncio.gather(*(agent.run(SUM, **keywords_of(agent, each)) for each in offered))
        assert all(each.tree.completions for each in sessions)
        assert s.session.tree.completions == []


def test_page_prints_the_agents_that_are_tested() -> None:
    printed = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    files = {(AGENTS / f"{each.module}.py").read_text(encoding="utf-8") for each in FRAMEWORKS}
    assert len(files) == len(FRAMEWORKS)
    assert {path.stem for path in AGENTS.glob("*.py")} == {each.module for each in FRAMEWORKS}
    assert sorted(printed) == sorted(files)


REPORT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="framework" value="dspy"/><property name="version" value="3.4.1"/>
<property name="steps" value="2"/></properties></testcase>
<testcase name="b"><properties><property name="framework" value="strands"/></properties><failure/></testcase>
<testcase name="c"><properties><property name="framework" value="crewai"/></properties><skipped/></testcase>
<testcase name="d"><failure/></testcase>
</testsuite></testsuites>"""


def test_table_says_what_became_of_each_framework(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(REPORT)
    found = outcomes([tmp_path / "results.xml"])
    assert found == {"dspy": Outcome("3.4.1", "2", "trained"), "strands": Outcome(result="failed")}
    lines = table(found).splitlines()
    assert len(lines) == 1 + len(FRAMEWORKS)
    assert lines[0].split() == ["framework", "version", "steps", "result"]
    assert lines[4].split() == ["dspy", "3.4.1", "2", "trained"]
    assert lines[10].split() == ["crewai", "-", "-", "not", "run"]


def test_table_fails_unless_every_framework_trained(tmp_path: Path) -> None:
    case = '<testcase><properties><property name="framework" value="{}"/></properties></testcase>'
    for count, code in ((len(FRAMEWORKS), 0), (len(FRAMEWORKS) - 1, 1)):
        cases = "".join(case.format(each.name) for each in FRAMEWORKS[:count])
        (tmp_path / "results.xml").write_text(f"<testsuite>{cases}</testsuite>")
        command = [sys.executable, more_frameworks.__file__, tmp_path / "results.xml", tmp_path / "missing.xml"]
        assert subprocess.run(command, capture_output=True, timeout=60).returncode == code
