"""Try again until right: what the model is shown, when it stops, what each try is worth."""

from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import pytest

from areal.api.errors import ConfigError, WorkflowError
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.engine.inference.fake import FakeEngine
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy
from areal.rollout.runners.agent import AgentRunner
from areal.rollout.runners.workflow import WorkflowRunner
from areal.utils import stats_tracker
from areal.workflow import MultiTurnWorkflow
from areal.workflow.math_task import TRY_AGAIN, score
from areal.workflow.openai.math_agent import MultiTurnMathAgent

TASK = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}
GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=32, temperature=0.5)


async def is_right(prompt: str, completion: str, *ids: Any, **data: Any) -> float:
    return score(completion, data)


def after(*answers: str) -> Any:
    """Says one answer after the other; which one is seen by how often the prompt was rebuked."""
    return lambda prompt: answers[prompt.count(TRY_AGAIN)]


def workflow(tokenizer: Any, **settings: Any) -> MultiTurnWorkflow:
    return MultiTurnWorkflow(is_right, GCONFIG, tokenizer, **settings)


async def test_right_answer_ends_the_episode_at_once(tokenizer: Any, speaker: Any) -> None:
    says = speaker(after("7"))
    rows = await workflow(tokenizer, max_turns=5).arun_episode(says.engine(), TASK)
    assert len(says.prompts) == 1
    assert rows["rewards"].tolist() == [1.0]


async def test_wrong_answer_is_told_so_and_tried_again(tokenizer: Any, speaker: Any) -> None:
    says = speaker(after("8", "9", "7"))
    rows = await workflow(tokenizer, max_turns=4).arun_episode(says.engine(), TASK)
    assert rows["rewards"].tolist() == [0.0, 0.0, 1.0]
    assert says.prompts[1] == tokenizer.apply_chat_template(
        [*TASK["messages"], {"role": "assistant", "content": "8"}, {"role": "user", "content": TRY_AGAIN}],
        tokenize=False,
        add_generation_prompt=True,
    )


async def test_tries_end_after_max_turns_and_leave_the_task_as_it_was(tokenizer: Any, speaker: Any) -> None:
    task = {**TASK, "messages": list(TASK["messages"])}
    rows = await workflow(tokenizer, max_turns=3).arun_episode(speaker(lambda prompt: "8").engine(), task)
    assert rows["rewards"].tolist() == [0.0, 0.0, 0.0]
    assert task == TASK


async def test_later_try_continues_the_ids_of_the_earlier_and_pays_it(tokenizer: Any, speaker: Any) -> None:
    rows = await workflow(tokenizer, turn_discount=0.5).arun_episode(speaker(after("8", "7")).engine(), TASK)
    first, second = (row[mask].tolist() for row, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True))
    assert second[: len(first)] == first
    for row, index, earned in ((0, 0, 0.5), (1, 1, 1.0)):
        sampled = rows["loss_mask"][row]
        assert set(rows["returns"][row][sampled].tolist()) == {earned}
        assert set(rows["completion_index"][row][sampled].tolist()) == {index}
        assert set(rows["temperatures"][row][sampled].tolist()) == {0.5}
    assert rows["loss_mask"].sum(1).tolist() == [2, 2]  # a digit and the end of the turn, each in its own row
    assert rows["completion_index"][~rows["loss_mask"]].eq(-1).all()


async def test_own_feedback_and_threshold(tokenizer: Any, speaker: Any) -> None:
    async def half(*args: Any, **data: Any) -> float:
        return 0.5

    says = speaker(lambda prompt: "8")
    settings: dict[str, Any] = {"feedback": "Sort 5291.", "max_turns": 3}
    rows = await MultiTurnWorkflow(half, GCONFIG, tokenizer, **settings).arun_episode(says.engine(), TASK)
    assert [prompt.count("Sort 5291.") for prompt in says.prompts] == [0, 1, 2]
    assert rows["returns"].amax(1).tolist() == [1.5, 1.0, 0.5]
    rows = await MultiTurnWorkflow(half, GCONFIG, tokenizer, threshold=0.5).arun_episode(says.engine(), TASK)
    assert rows["rewards"].tolist() == [0.5]


async def test_reward_function_sees_every_try_with_its_whole_prompt(tokenizer: Any, speaker: Any) -> None:
    seen: list[tuple[str, str, list[int]]] = []

    async def reward(
        prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **_: Any
    ) -> float:
        seen.append((prompt, completion, prompt_ids))
        return float(completion == answer)

    says = speaker(after("8", "7"))
    await MultiTurnWorkflow(reward, GCONFIG, tokenizer).arun_episode(says.engine(), TASK)
    assert [prompt for prompt, _, _ in seen] == says.prompts
    assert [completion for _, completion, _ in seen] == ["8", "7"]
    assert [tokenizer.decode(ids) for _, _, ids in seen] == says.prompts


async def test_reward_of_none_rejects_the_episode(tokenizer: Any, speaker: Any) -> None:
    async def second_is_void(prompt: str, *args: Any, **data: Any) -> float | None:
        return None if TRY_AGAIN in prompt else 0.0

    engine = speaker(after("8", "7")).engine()
    assert await MultiTurnWorkflow(second_is_void, GCONFIG, tokenizer).arun_episode(engine, TASK) is None


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (("7",), {"reward": 1.0, "turns": 1.0, "first_try": 1.0, "success": 1.0}),
        (("8", "7"), {"reward": 1.0, "turns": 2.0, "first_try": 0.0, "success": 1.0}),
        (("8", "9"), {"reward": 0.0, "turns": 2.0, "first_try": 0.0, "success": 0.0}),
    ],
)
async def test_turns_and_successes_are_recorded(
    tokenizer: Any, speaker: Any, answers: tuple[str, ...], expected: dict[str, float]
) -> None:
    with stats_tracker.collect() as stats, workflow_context.enter(WorkflowContext(is_eval=False)):
        await workflow(tokenizer).arun_episode(speaker(after(*answers)).engine(), TASK)
    assert stats.means() == {f"rollout/{name}": value for name, value in expected.items()}


def speaking_engine(tokenizer: Any, answers: Sequence[Sequence[int]]) -> FakeEngine:
    """Says token ids, some of which are not how the tokenizer would write their text."""

    def script(ids: Sequence[int]) -> Sequence[int]:
        return answers[tokenizer.decode(ids).count(TRY_AGAIN)]

    return FakeEngine(vocab_size=len(tokenizer), max_positions=4096, script=script, tokenizer=tokenizer)


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("tries", [1, 2, 3])
async def test_sdk_agent_with_the_same_conversation_leaves_the_same_rows(
    tokenizer: Any, tries: int, discount: float
) -> None:
    end = tokenizer.eos_token_id
    letters = [*map(tokenizer.convert_tokens_to_ids, "wrong"), end]  # a tokenizer would merge them
    assert len(tokenizer.encode("wrong")) < 5
    cut_off = tokenizer.encode("8" * 2 * GCONFIG.max_new_tokens)
    engine = speaking_engine(tokenizer, [letters, cut_off, [*tokenizer.encode("7"), end]][3 - tries :])
    context = WorkflowContext(is_eval=False)
    own = WorkflowRunner(workflow(tokenizer, max_turns=3, turn_discount=discount), engine, tokenizer)
    by_workflow, _ = await own.play(dict(TASK), context, greedy=False, seconds=60)
    proxy = Proxy(engine, tokenizer, gconfig=GCONFIG, max_positions=4096)
    await proxy.start()
    try:
        runner = AgentRunner(MultiTurnMathAgent(max_turns=3), proxy, AgentConfig(turn_discount=discount), GCONFIG)
        by_agent, _ = await runner.play(dict(TASK), context, greedy=False, seconds=60)
    finally:
        await proxy.aclose()
    assert by_workflow is not None
    assert by_agent is not None
    assert (by_workflow.reward, by_workflow.calls) == (by_agent.reward, by_agent.calls) == (1.0, tries)
    for ours, theirs in zip(by_workflow.rows, by_agent.rows, strict=True):
        for name, value in vars(ours).items():
            np.testing.assert_array_equal(value, getattr(theirs, name), err_msg=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_turns": 0}, "max_turns must be >= 1, got 0"), ({"turn_discount": 1.5}, "turn_discount must lie in")],
)
def test_settings_without_meaning_are_refused(tokenizer: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workflow(tokenizer, **settings)


async def test_task_without_messages_is_refused_by_name(tokenizer: Any, speaker: Any) -> None:
    with pytest.raises(WorkflowError, match="MultiTurnWorkflow needs a task with `messages`"):
        await workflow(tokenizer).arun_episode(speaker(lambda prompt: "").engine(), {"question": "3 + 4?"})


async def test_workflow_travels_by_cloudpickle(tokenizer: Any, speaker: Any) -> None:
    travelled = cloudpickle.loads(cloudpickle.dumps(workflow(tokenizer)))
    rows = await travelled.arun_episode(speaker(after("8", "7")).engine(), TASK)
    assert rows["rewards"].tolist() == [0.0, 1.0]
