import subprocess
import sys
import threading
from typing import Any

import cloudpickle
import pytest

from areal.api.errors import ConfigError, WorkflowError
from areal.engine.builtin.text import CALCULATOR_TOOLS, RETRY
from areal.trajectory import assign_reward, returns
from areal.workflow.openai.math_agent import MathAgent, MathToolAgent, MultiTurnMathAgent

SUM = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}
SORT = {"messages": [{"role": "user", "content": "Sort 3120"}], "answer": "0123"}

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@pytest.mark.parametrize(
    ("task", "said", "reward"),
    [
        (SUM, "7", 1.0),
        (SUM, "3 + 4 makes 7.", 1.0),
        (SUM, "8", 0.0),
        (SUM, "", 0.0),
        (SORT, "0123", 1.0),
        (SORT, "123", 0.0),
        ({**SUM, "answer": 7}, "7", 1.0),
    ],
)
async def test_one_call_is_rewarded_by_its_answer(stage: Any, task: dict[str, Any], said: str, reward: float) -> None:
    async with stage(lambda prompt: said) as s:
        assert await MathAgent().run(task, **s.kwargs()) == reward
        assert len(s.session.tree.completions) == 1


async def test_agent_reaches_the_model_over_the_network_without_the_injected_client(stage: Any) -> None:
    async with stage(lambda prompt: "7") as s:
        address = {"base_url": s.session.base_url, "api_key": s.session.api_key}
        assert await MathAgent().run(SUM, **address) == 1.0
        assert s.session.tree.completions[0].message["content"] == "7"


async def test_agent_falls_back_to_the_environment(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(lambda prompt: "7") as s:
        monkeypatch.setenv("OPENAI_BASE_URL", s.session.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", s.session.api_key)
        assert await MathAgent().run(SUM) == 1.0
        assert len(s.session.tree.completions) == 1


async def test_wrong_answer_is_told_so_and_tried_again(stage: Any) -> None:
    async with stage(lambda prompt: "7" if RETRY in prompt else "8") as s:
        rewards = await MultiTurnMathAgent().run(SUM, **s.kwargs())
        first, second = s.session.tree.completions
        assert rewards == {first.id: 0.0, second.id: 1.0}
        assert s.session.tree.conversation(second)[1:3] == [
            {"role": "assistant", "content": "8"},
            {"role": "user", "content": RETRY},
        ]


async def test_second_try_continues_the_tokens_of_the_first_and_pays_it(stage: Any) -> None:
    async with stage(lambda prompt: "7" if RETRY in prompt else "8") as s:
        tree = s.session.tree
        assign_reward(tree, await MultiTurnMathAgent().run(SUM, **s.kwargs()), "MultiTurnMathAgent")
        assert tree.completions[1].extends
        assert returns(tree, 0.5) == [0.5, 1.0]


async def test_right_answer_is_not_asked_for_again(stage: Any) -> None:
    async with stage(lambda prompt: "7") as s:
        assert list((await MultiTurnMathAgent(max_turns=5).run(SUM, **s.kwargs())).values()) == [1.0]


async def test_tries_end_after_max_turns(stage: Any) -> None:
    async with stage(lambda prompt: "") as s:
        assert list((await MultiTurnMathAgent(max_turns=3).run(SUM, **s.kwargs())).values()) == [0.0, 0.0, 0.0]


async def test_task_is_left_as_it_was(stage: Any) -> None:
    task = {**SUM, "messages": list(SUM["messages"])}
    async with stage(lambda prompt: "8") as s:
        await MultiTurnMathAgent().run(task, **s.kwargs())
    assert task == SUM


@pytest.mark.parametrize("agent", [MultiTurnMathAgent, MathToolAgent])
def test_less_than_one_turn_is_refused(agent: Any) -> None:
    with pytest.raises(ConfigError, match="max_turns must be >= 1, got 0"):
        agent(max_turns=0)


async def test_tool_agent_calls_the_calculator_and_reads_its_result(stage: Any) -> None:
    async with stage(lambda prompt: "It is 7." if "<|im_start|>tool\n7<|im_end|>" in prompt else CALL) as s:
        assert await MathToolAgent().run(SUM, **s.kwargs()) == 1.0
        first, second = s.session.tree.completions
        assert first.message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 3, "b": 4}}
        assert second.extends
        assert second.parent == first.index


async def test_tool_agent_shows_the_model_exactly_the_tools_it_was_taught(stage: Any, tokenizer: Any) -> None:
    async with stage(lambda prompt: "7") as s:
        await MathToolAgent().run(SUM, **s.kwargs())
        taught = tokenizer.apply_chat_template(
            SUM["messages"], tools=CALCULATOR_TOOLS, tokenize=False, add_generation_prompt=True
        )
        assert s.speaker.prompts == [taught]


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        (CALL, 3),
        (CALL.replace("add", "fly"), 1),
        (CALL.replace("3", '"x"'), 3),
        ("<tool_call>\n{broken 7\n</tool_call>", 1),
        ('{"name": "add", "b": 7', 1),
        ("", 1),
    ],
    ids=["never answers", "unknown tool", "wrong arguments", "broken call", "call without its tag", "empty answer"],
)
async def test_what_the_model_does_wrong_with_tools_is_a_wrong_answer(stage: Any, said: str, calls: int) -> None:
    async with stage(lambda prompt: said) as s:
        assert await MathToolAgent(max_turns=3).run(SUM, **s.kwargs()) == 0.0
        assert len(s.session.tree.completions) == calls


async def test_tool_agent_starts_no_thread_that_exports_traces(stage: Any) -> None:
    async with stage(lambda prompt: "7" if "<|im_start|>tool" in prompt else CALL) as s:
        agent = MathToolAgent()
        before = set(threading.enumerate())
        await agent.run(SUM, **s.kwargs())
        started = [thread.name for thread in set(threading.enumerate()) - before]
        assert [name for name in started if not name.startswith("asyncio_")] == []


async def test_tool_agent_travels_by_cloudpickle(stage: Any) -> None:
    agent = cloudpickle.loads(cloudpickle.dumps(MathToolAgent(max_turns=2)))
    async with stage(lambda prompt: "7" if "<|im_start|>tool" in prompt else CALL) as s:
        assert await agent.run(SUM, **s.kwargs()) == 1.0


def test_missing_agents_sdk_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agents", None)
    with pytest.raises(WorkflowError, match=r"pip install .*\[agents\]'$"):
        MathToolAgent()


@pytest.mark.slow
def test_importing_the_agents_loads_neither_torch_nor_the_agents_sdk() -> None:
    code = "import sys, areal.workflow, areal.workflow.openai.math_agent\n"
    code += "assert not {'torch', 'transformers', 'agents'} & set(sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
