"""The shipped agents of every framework, with the real library: answers, tools, tokens, and both routes."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import cloudpickle
import pytest
from calculator_task import CALL, SUM, use_the_calculator

from areal.api.errors import ConfigError, WorkflowError

OPENAI = "areal.workflow.openai.math_agent"

LIBRARIES = {
    "openai": "openai",
    "openai-agents": "agents",
    "langchain": "langchain_openai",
    "langgraph": "langgraph",
    "anthropic": "anthropic",
    "pydantic-ai": "pydantic_ai",
    "camel": "camel",
}
"""Framework -> the module without which its agents cannot be made."""

EXTRAS = {
    "openai-agents": "agents",
    "langchain": "langchain",
    "langgraph": "langgraph",
    "anthropic": "anthropic",
    "pydantic-ai": "pydantic-ai",
    "camel": "camel",
}

PLAIN_AGENTS = [
    ("openai", f"{OPENAI}.MathAgent"),
    ("langchain", "areal.workflow.langchain.math_agent.MathAgent"),
    ("anthropic", "areal.workflow.anthropic.math_agent.MathAgent"),
]
RETRYING_AGENTS = [
    ("openai", f"{OPENAI}.MultiTurnMathAgent"),
    ("langchain", "areal.workflow.langchain.math_agent.MultiTurnMathAgent"),
]
TOOL_AGENTS = [
    ("openai-agents", f"{OPENAI}.MathToolAgent"),
    ("openai-agents", f"{OPENAI}.ResponsesMathToolAgent"),
    ("langgraph", "areal.workflow.langgraph.math_agent.MathToolAgent"),
    ("anthropic", "areal.workflow.anthropic.math_agent.MathToolAgent"),
    ("pydantic-ai", "areal.workflow.pydantic_ai.math_agent.MathToolAgent"),
    ("camel", "areal.workflow.camel.math_agent.MathToolAgent"),
]

Maker = Callable[..., Any]


def of(agents: list[tuple[str, str]]) -> Any:
    """Parametrise a test over agents; one whose framework is not installed is skipped."""
    return pytest.mark.parametrize(
        "make", agents, indirect=True, ids=[f"{framework}-{name.rpartition('.')[2]}" for framework, name in agents]
    )


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Maker:
    framework, name = request.param
    pytest.importorskip(LIBRARIES[framework], reason=f"{framework} is not installed; CAMEL has `make test-camel`")
    module, _, cls = name.rpartition(".")
    maker: Maker = getattr(import_module(module), cls)
    return maker


@of(PLAIN_AGENTS + TOOL_AGENTS)
@pytest.mark.parametrize("route", ["in process", "over TCP"])
@pytest.mark.parametrize(("said", "reward"), [("It is 7.", 1.0), ("8", 0.0)])
async def test_answer_arrives_through_each_route_and_is_scored(
    stage: Any, make: Maker, route: str, said: str, reward: float
) -> None:
    async with stage(lambda prompt: said) as s:
        assert await make().run(SUM, **s.kwargs(route)) == reward
        s.check_one_conversation(1)
        s.check_tokens()


@of(RETRYING_AGENTS)
async def test_each_try_is_rewarded_under_its_own_completion(stage: Any, make: Maker) -> None:
    async with stage(lambda prompt: "7" if "Try again" in prompt else "8") as s:
        rewards = await make(max_turns=3).run(SUM, **s.kwargs())
        assert list(rewards.items()) == [
            (node.id, reward) for node, reward in zip(s.session.tree.completions, (0.0, 1.0), strict=True)
        ]
        s.check_one_conversation(2)
        s.check_tokens()


@of(TOOL_AGENTS)
@pytest.mark.parametrize("route", ["in process", "over TCP"])
async def test_tool_call_makes_the_round_trip_in_one_conversation(stage: Any, make: Maker, route: str) -> None:
    async with stage(use_the_calculator) as s:
        assert await make().run(SUM, **s.kwargs(route)) == 1.0
        first, second = s.session.tree.completions
        (call,) = first.message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": {"a": 3, "b": 4}}
        assert [message["role"] for message in second.messages] == ["tool"]
        assert second.messages[0]["tool_call_id"] == call["id"]
        s.check_one_conversation(2)
        s.check_tokens()


@of(TOOL_AGENTS)
async def test_two_calls_in_one_answer_are_both_answered(stage: Any, make: Maker) -> None:
    both = CALL + CALL.replace("add", "multiply")
    async with stage(lambda prompt: "7" if "<|im_start|>tool\n12<|im_end|>" in prompt else both) as s:
        assert await make().run(SUM, **s.kwargs()) == 1.0
        assert [message["content"] for message in s.session.tree.completions[1].messages] == ["7", "12"]
        s.check_one_conversation(2)
        s.check_tokens()


@of(TOOL_AGENTS)
async def test_text_next_to_a_tool_call_stays_in_the_conversation(stage: Any, make: Maker) -> None:
    async with stage(lambda prompt: use_the_calculator(prompt).replace("<tool_call>", "Let me add.<tool_call>")) as s:
        assert await make().run(SUM, **s.kwargs()) == 1.0
        s.check_one_conversation(2)
        s.check_tokens()


@of(TOOL_AGENTS)
async def test_several_tool_calls_one_after_the_other_stay_one_conversation(stage: Any, make: Maker) -> None:
    def answer(prompt: str) -> str:
        return "7" if prompt.count("<|im_start|>tool") == 3 else CALL

    async with stage(answer) as s:
        assert await make(max_turns=4).run(SUM, **s.kwargs()) == 1.0
        s.check_one_conversation(4)
        s.check_tokens()


@of(TOOL_AGENTS)
@pytest.mark.parametrize(
    "said",
    [CALL, CALL.replace("add", "fly"), CALL.replace("3", '"x"'), "<tool_call>\n{broken 7\n</tool_call>", '{"b": 7', ""],
    ids=["never answers", "unknown tool", "wrong arguments", "broken call", "call without its tag", "empty answer"],
)
async def test_what_the_model_does_wrong_with_tools_is_a_wrong_answer(stage: Any, make: Maker, said: str) -> None:
    async with stage(lambda prompt: said, constrained=False) as s:
        assert await make(max_turns=3).run(SUM, **s.kwargs()) == 0.0
        assert 1 <= len(s.session.tree.completions) <= 3
        s.check_tokens()


@of(PLAIN_AGENTS + TOOL_AGENTS)
async def test_system_text_and_earlier_turns_reach_the_model(stage: Any, make: Maker) -> None:
    said = [("system", "Be brief."), ("user", "What is 1 + 1?"), ("assistant", "2"), ("user", "What is 3 + 4?")]
    task = {**SUM, "messages": [{"role": role, "content": content} for role, content in said]}
    async with stage(lambda prompt: "7") as s:
        assert await make().run(task, **s.kwargs()) == 1.0
        (node,) = s.session.tree.completions
        assert [(message["role"], message["content"]) for message in node.messages] == said


@of(TOOL_AGENTS)
async def test_episodes_of_one_instance_run_at_the_same_time_without_mixing(stage: Any, make: Maker) -> None:
    async with stage(use_the_calculator) as s:
        agent = make()
        sessions = [s.proxy.open_session() for _ in range(8)]
        keys = [{"base_url": session.base_url, "api_key": session.api_key} for session in sessions]
        assert await asyncio.gather(*(agent.run(SUM, **{**s.kwargs(), **key}) for key in keys)) == [1.0] * 8
        assert [len(session.tree.completions) for session in sessions] == [2] * 8
        assert s.session.tree.completions == []


@of(PLAIN_AGENTS + TOOL_AGENTS)
async def test_agent_falls_back_to_the_environment(stage: Any, make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(lambda prompt: "7") as s:
        for name in ("OPENAI", "ANTHROPIC"):
            monkeypatch.setenv(f"{name}_API_KEY", s.session.api_key)
        monkeypatch.setenv("OPENAI_BASE_URL", s.session.base_url)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", s.session.base_url.removesuffix("/v1"))
        assert await make().run(SUM) == 1.0
        s.check_tokens()


@of(PLAIN_AGENTS + RETRYING_AGENTS + TOOL_AGENTS)
async def test_agent_travels_by_cloudpickle(stage: Any, make: Maker) -> None:
    agent = cloudpickle.loads(cloudpickle.dumps(make()))
    async with stage(lambda prompt: "7") as s:
        await agent.run(SUM, **s.kwargs())
        assert len(s.session.tree.completions) == 1


@of(RETRYING_AGENTS + TOOL_AGENTS)
def test_less_than_one_turn_is_refused(make: Maker) -> None:
    with pytest.raises(ConfigError, match="max_turns must be >= 1, got 0"):
        make(max_turns=0)


@pytest.mark.parametrize(("framework", "name"), [each for each in PLAIN_AGENTS + TOOL_AGENTS if each[0] in EXTRAS])
def test_missing_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, framework: str, name: str) -> None:
    library = LIBRARIES[framework]
    for loaded in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, loaded, None)
    module, _, cls = name.rpartition(".")
    with pytest.raises(WorkflowError, match=rf"pip install .*\[{EXTRAS[framework]}\]'$"):
        getattr(import_module(module), cls)()


def test_importing_the_agents_loads_neither_torch_nor_a_framework() -> None:
    modules = sorted({name.rpartition(".")[0] for _, name in PLAIN_AGENTS + TOOL_AGENTS})
    heavy = {"torch", "transformers", *LIBRARIES.values()} - {"openai"}
    code = f"import sys, {', '.join(modules)}\nassert not {heavy!r} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
