import asyncio
import functools
import math
import threading
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from areal.api.errors import ContextLengthError, RewardInvalid, WorkflowError
from areal.api.reward_api import AsyncRewardWrapper, Value
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.fake import FakeEngine
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.reward import code_reward, exact_match_reward
from areal.trajectory.rendering import LONG_TEXT, Renderer
from areal.utils import stats_tracker
from areal.utils.data import concat_padded_tensors
from areal.workflow import MultiTurnWorkflow, RLVRWorkflow
from areal.workflow.openai.math_agent import MathAgent

TASK = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}
GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=32, temperature=0.5)


async def one(*args: Any, **data: Any) -> float:
    return 1.0


async def test_episode_is_one_row_of_tensors_batch_first(tokenizer: Any, speaker: Any) -> None:
    row = await RLVRWorkflow(one, GCONFIG, tokenizer).arun_episode(speaker(lambda prompt: "7").engine(), TASK)
    prompt = tokenizer.apply_chat_template(TASK["messages"], add_generation_prompt=True, return_dict=False)
    answer = [*tokenizer.encode("7"), tokenizer.eos_token_id]
    asked, said = len(prompt), len(answer)
    assert row["input_ids"].tolist() == [prompt + answer]
    assert row["attention_mask"].tolist() == [[True] * (asked + said)]
    assert row["loss_mask"].tolist() == [[False] * asked + [True] * said]
    assert row["versions"].tolist() == [[-1] * asked + [0] * said]
    assert row["temperatures"].tolist() == [[1.0] * asked + [0.5] * said]
    assert row["logprobs"][0, :asked].eq(0).all()
    assert row["logprobs"][0, asked:].lt(0).all()
    assert row["rewards"].tolist() == [1.0]


async def test_rows_of_different_length_join(tokenizer: Any, speaker: Any) -> None:
    workflow = RLVRWorkflow(one, GCONFIG, tokenizer)
    short, long = [await workflow.arun_episode(speaker(lambda prompt, t=t: t).engine(), TASK) for t in ("7", "seven")]
    batch = concat_padded_tensors([short, long])
    assert batch["input_ids"].shape == batch["temperatures"].shape == long["input_ids"].expand(2, -1).shape
    assert batch["rewards"].shape == (2,)


@pytest.fixture
def encoding_threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Those in which text becomes tokens."""
    threads = set()
    encode = Renderer.encode

    def noticed(self: Renderer, *args: Any, **kwargs: Any) -> list[int]:
        threads.add(threading.get_ident())
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(Renderer, "encode", noticed)
    return threads


@pytest.mark.parametrize("kind", [RLVRWorkflow, MultiTurnWorkflow])
@pytest.mark.parametrize(("words", "is_here"), [(1, True), (LONG_TEXT, False)])
async def test_long_prompts_hold_up_no_other_episode(
    tokenizer: Any, speaker: Any, encoding_threads: set[int], kind: Any, words: int, is_here: bool
) -> None:
    workflow = kind(one, GCONFIG, tokenizer)
    encoding_threads.clear()  # constructors may encode
    with suppress(ContextLengthError):  # of the engine, which the long one is too long for
        task = {"messages": [{"role": "user", "content": "7 " * words}]}
        await workflow.arun_episode(speaker(lambda prompt: "7").engine(), task)
    assert encoding_threads
    assert (threading.get_ident() in encoding_threads) is is_here


async def test_prompt_has_the_tokens_that_an_agent_would_cause(tokenizer: Any, stage: Any, speaker: Any) -> None:
    row = await RLVRWorkflow(one, GCONFIG, tokenizer).arun_episode(speaker(lambda prompt: "7").engine(), TASK)
    async with stage(lambda prompt: "7") as s:
        await MathAgent().run(TASK, **s.kwargs())
        assert row["input_ids"][0].tolist() == s.session.tree.token_ids(s.session.tree.completions[0])


@pytest.mark.parametrize("changes", [{"greedy": True}, {"temperature": 0.0}])
async def test_greedy_tokens_have_temperature_1(tokenizer: Any, speaker: Any, changes: dict[str, Any]) -> None:
    workflow = RLVRWorkflow(one, GCONFIG.new(**changes), tokenizer)
    row = await workflow.arun_episode(speaker(lambda prompt: "7").engine(), TASK)
    assert row["temperatures"].eq(1).all()


async def test_reward_function_gets_texts_ids_and_the_task(tokenizer: Any, speaker: Any) -> None:
    seen: dict[str, Any] = {}

    async def reward(
        prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float:
        seen.update(prompt=prompt, completion=completion, prompt_ids=prompt_ids, completion_ids=completion_ids, **data)
        return 0.5

    row = await RLVRWorkflow(reward, GCONFIG, tokenizer).arun_episode(speaker(lambda prompt: "7").engine(), TASK)
    assert seen["prompt"] == tokenizer.apply_chat_template(TASK["messages"], tokenize=False, add_generation_prompt=True)
    assert seen["completion"] == "7"
    assert row["input_ids"][0].tolist() == seen["prompt_ids"] + seen["completion_ids"]
    assert seen["messages"] == TASK["messages"]
    assert seen["answer"] == "7"
    assert row["rewards"].tolist() == [0.5]


async def test_completion_ends_before_a_stop_text(tokenizer: Any, speaker: Any) -> None:
    async def reward(prompt: str, completion: str, *rest: Any, **data: Any) -> float:
        return float(completion == "7")

    workflow = RLVRWorkflow(reward, GCONFIG.new(stop=["!"]), tokenizer)
    row = await workflow.arun_episode(speaker(lambda prompt: "7!").engine(), TASK)
    assert row["rewards"].tolist() == [1.0]


async def test_episodes_value_wins_over_a_key_of_the_same_name(tokenizer: Any, speaker: Any) -> None:
    async def reward(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        assert set(data) == {"messages", "answer"}
        return float(prompt != "the task's own" and completion == "7")

    task = {**TASK, "prompt": "the task's own", "completion_ids": []}
    row = await RLVRWorkflow(reward, GCONFIG, tokenizer).arun_episode(speaker(lambda prompt: "7").engine(), task)
    assert row["rewards"].tolist() == [1.0]


async def test_key_reaches_a_reward_function_whose_parameters_have_other_names(tokenizer: Any, speaker: Any) -> None:
    async def reward(asked: str, said: str, asked_ids: Any, said_ids: Any, prompt: str, **data: Any) -> float:
        return float(prompt == "the task's own")

    task = {**TASK, "prompt": "the task's own"}
    row = await RLVRWorkflow(reward, GCONFIG, tokenizer).arun_episode(speaker(lambda prompt: "7").engine(), task)
    assert row["rewards"].tolist() == [1.0]


async def test_a_task_does_not_choose_the_isolation_of_a_program(tokenizer: Any, speaker: Any) -> None:
    async def reward(*args: Any, isolation: str = "auto", **data: Any) -> float:
        return float(isolation == "auto" and data["level"] == 3)

    reward.settings = code_reward.settings  # type: ignore[attr-defined]
    task = {**TASK, "isolation": "none", "level": 3}
    for function in (reward, functools.partial(reward)):
        workflow = RLVRWorkflow(function, GCONFIG, tokenizer)
        row = await workflow.arun_episode(speaker(lambda prompt: "7").engine(), task)
        assert row["rewards"].tolist() == [1.0]


@pytest.mark.slow
async def test_synchronous_reward_function_is_run_outside_the_event_loop(tokenizer: Any, speaker: Any) -> None:
    workflow = RLVRWorkflow(exact_match_reward, GCONFIG, tokenizer)
    engine = speaker(lambda prompt: "It is 7.").engine()
    rows = await asyncio.gather(*(workflow.arun_episode(engine, {**TASK, "answer": a}) for a in ("7", "8")))
    assert [row["rewards"].item() for row in rows] == [1.0, 0.0]


@pytest.mark.parametrize("reward", [1, True, np.float32(1), torch.tensor(1.0)])
async def test_scalars_of_every_kind_are_rewards(tokenizer: Any, speaker: Any, reward: Any) -> None:
    async def gives(*args: Any, **data: Any) -> Any:
        return reward

    row = await RLVRWorkflow(gives, GCONFIG, tokenizer).arun_episode(speaker(lambda prompt: "7").engine(), TASK)
    assert row["rewards"].dtype == torch.float32
    assert row["rewards"].tolist() == [1.0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1.0", [1.0], torch.ones(2)])
async def test_reward_that_is_no_finite_number_rejects_the_episode_by_name(
    tokenizer: Any, speaker: Any, reward: Any
) -> None:
    async def gives(*args: Any, **data: Any) -> Any:
        return reward

    with pytest.raises(RewardInvalid, match="finite number"):
        await RLVRWorkflow(gives, GCONFIG, tokenizer).arun_episode(speaker(lambda prompt: "7").engine(), TASK)


async def test_reward_of_none_rejects_the_episode(tokenizer: Any, speaker: Any) -> None:
    async def gives(*args: Any, **data: Any) -> None:
        return None

    workflow = RLVRWorkflow(gives, GCONFIG, tokenizer)
    assert await workflow.arun_episode(speaker(lambda prompt: "7").engine(), TASK) is None


async def test_wrapped_reward_function_keeps_its_own_settings(tokenizer: Any, speaker: Any) -> None:
    async def fails(*args: Any, **data: Any) -> float:
        raise ZeroDivisionError

    workflow = RLVRWorkflow(AsyncRewardWrapper(fails, on_failure=Value(-1.0)), GCONFIG, tokenizer)
    row = await workflow.arun_episode(speaker(lambda prompt: "7").engine(), TASK)
    assert row["rewards"].tolist() == [-1.0]


@pytest.mark.parametrize(("is_eval", "scope"), [(False, "rollout"), (True, "eval-rollout")])
async def test_reward_is_recorded_under_the_episodes_scope(
    tokenizer: Any, speaker: Any, is_eval: bool, scope: str
) -> None:
    workflow = RLVRWorkflow(one, GCONFIG, tokenizer)
    with stats_tracker.collect() as stats, workflow_context.enter(WorkflowContext(is_eval=is_eval)):
        await workflow.arun_episode(speaker(lambda prompt: "7").engine(), TASK)
    assert stats.means() == {f"{scope}/reward": 1.0}


async def test_generation_stops_at_the_end_of_the_turn_or_at_the_limit(tokenizer: Any) -> None:
    row = await RLVRWorkflow(one, GCONFIG, tokenizer).arun_episode(FakeEngine(vocab_size=len(tokenizer)), TASK)
    sampled = row["input_ids"][row["loss_mask"]].tolist()
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert len(sampled) == GCONFIG.max_new_tokens or sampled[-1] in ends
    assert not ends & set(sampled[:-1])


async def test_task_without_messages_is_refused_with_its_keys(tokenizer: Any, speaker: Any) -> None:
    with pytest.raises(WorkflowError, match="needs a task with `messages`, got the keys 'question'"):
        await RLVRWorkflow(one, GCONFIG, tokenizer).arun_episode(
            speaker(lambda prompt: "").engine(), {"question": "3 + 4?"}
        )


async def test_workflow_travels_by_cloudpickle(tokenizer: Any, speaker: Any) -> None:
    workflow = cloudpickle.loads(cloudpickle.dumps(RLVRWorkflow(one, GCONFIG, tokenizer)))
    row = await workflow.arun_episode(speaker(lambda prompt: "7").engine(), TASK)
    assert row["rewards"].tolist() == [1.0]


def test_unknown_name_of_the_room_is_refused() -> None:
    import areal.workflow

    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        areal.workflow.Nothing  # noqa: B018
