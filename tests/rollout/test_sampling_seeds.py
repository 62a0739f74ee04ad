"""What a run samples follows from its seed: again the same for the same seed, different for every sample and call."""

import asyncio
import pickle
from itertools import chain
from typing import Any

import pytest
import torch
from fake_workers import make_pipeline
from openai import InternalServerError
from sdk_call import DATA, MAX_POSITIONS, chat

from areal.api.errors import EngineError
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.messages import GroupTask
from areal.api.workflow_api import RolloutWorkflow
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.engine.inference.fake import FakeEngine
from areal.infra import workflow_context
from areal.proxy import Proxy
from areal.rollout.runners.workflow import RecordingEngine

PROMPT = DATA["messages"]
OTHER = [{"role": "user", "content": "hello there"}]


class ThreeCalls:
    """Two equal calls at once, one of another prompt with them, and a further turn."""

    async def run(self, data: dict[str, Any], **kwargs: Any) -> float:
        answers = await asyncio.gather(*(chat(kwargs, messages) for messages in (PROMPT, PROMPT, OTHER)))
        text = min(answer.choices[0].message.content or "" for answer in answers[:2])  # whichever came first
        await chat(kwargs, [*PROMPT, {"role": "assistant", "content": text}, *OTHER])
        return 1.0


class ReversedCalls:
    """The same calls in another order."""

    async def run(self, data: dict[str, Any], **kwargs: Any) -> float:
        await asyncio.gather(*(chat(kwargs, messages) for messages in (OTHER, PROMPT, PROMPT)))
        return 1.0


class FixedSeed:
    """An agent that sets the seed of its calls itself."""

    async def run(self, data: dict[str, Any], **kwargs: Any) -> float:
        await chat(kwargs, PROMPT, seed=42)
        await chat(kwargs, OTHER, seed=42)
        return 1.0


class TellsItsSeed:
    async def run(self, data: dict[str, Any], **kwargs: Any) -> float:
        seed = workflow_context.get().seed
        assert seed is not None
        await chat(kwargs, PROMPT)
        return float(seed % 2**20)


class TwoGenerations(RolloutWorkflow):
    """A workflow that calls the engine itself, with settings that may hold a seed."""

    def __init__(self, seed: int | None = None) -> None:
        self._gconfig = GenerationHyperparameters(max_new_tokens=16, seed=seed)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        requests = [ModelRequest("r", [5, 6, 7], self._gconfig) for _ in range(2)]
        first, _ = await asyncio.gather(*map(engine.agenerate, requests))
        return {
            "input_ids": torch.tensor(first.input_tokens),
            "output_ids": torch.tensor(first.output_tokens),
            "reward": torch.tensor(1.0),
        }


@pytest.fixture
def seeds(engine: Any) -> Any:
    """The seeds that requests reached the engine with since the last look, by prompt, smallest first."""
    engine.script = None

    def taken() -> dict[tuple[int, ...], list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for request in engine.requests:
            found.setdefault(tuple(request.input_ids), []).append(request.gconfig.seed)
        engine.requests.clear()
        return {prompt: sorted(numbers) for prompt, numbers in found.items()}

    return taken


async def run_group(worker: Any, task_id: int = 7, n_samples: int = 4, **options: Any) -> list[list[list[int]]]:
    """The ids of every row of every sample."""
    result = await asyncio.wait_for(worker.run_group(GroupTask(task_id, pickle.dumps(DATA), n_samples, **options)), 120)
    assert result.rejections == []
    return [sorted(row.input_ids.tolist() for row in episode.rows) for episode in result.episodes]


@pytest.mark.parametrize("workflow", [ThreeCalls(), TwoGenerations(), TwoGenerations(seed=3), FixedSeed()])
async def test_equal_seeds_sample_equal_tokens_and_samples_differ(start_worker: Any, seeds: Any, workflow: Any) -> None:
    runs, asked = [], []
    for seed in (1, 1, 2):
        runs.append(await run_group(await start_worker(workflow, seed=seed)))
        asked.append(seeds())
    assert runs[0] == runs[1] != runs[2]
    assert asked[0] == asked[1] != asked[2]
    assert len({str(sample) for sample in runs[0]}) == 4
    assert not {*chain(*asked[0].values())} & {*chain(*asked[2].values())}


async def test_every_task_sample_and_call_has_a_seed_of_its_own(start_worker: Any, seeds: Any) -> None:
    worker = await start_worker(ThreeCalls(), seed=1)
    for task_id, options in [(7, {}), (8, {}), (7, {"is_eval": True})]:
        await run_group(worker, task_id, **options)
    numbers = list(chain(*seeds().values()))
    assert len(numbers) == len(set(numbers)) == 3 * 4 * 4
    assert all(0 <= number < 2**63 for number in numbers)


async def test_evaluations_of_the_same_weights_sample_the_same_answers(start_worker: Any, seeds: Any) -> None:
    pipeline = make_pipeline([await start_worker(ThreeCalls(), seed=1)])
    tasks = [DATA] * 3  # equal ones, so that what differs is what they drew
    first, again = [
        [
            sorted(row.input_ids.tolist() for row in result.episodes[0].rows)
            for result in await pipeline.evaluate(tasks, greedy=False, max_running=max_running)
        ]
        for max_running in (1, 8)
    ]
    assert first == again
    assert len({str(answers) for answers in first}) == 3
    await pipeline.aclose()


async def test_calls_made_at_once_have_their_seeds_in_whatever_order_they_come(start_worker: Any, seeds: Any) -> None:
    await run_group(await start_worker(ThreeCalls(), seed=1))
    first = seeds()
    await run_group(await start_worker(ReversedCalls(), seed=1))
    again = seeds()
    assert again == {prompt: first[prompt] for prompt in again}


async def test_a_seed_of_the_agents_own_repeats_within_an_episode_and_differs_between_episodes(
    start_worker: Any, seeds: Any
) -> None:
    await run_group(await start_worker(FixedSeed(), seed=1))
    one, other = seeds().values()
    assert one == other
    assert len(set(one)) == 4


async def test_an_agent_can_ask_for_its_episodes_seed(start_worker: Any, seeds: Any) -> None:
    worker = await start_worker(TellsItsSeed(), seed=1)
    groups = [await worker.run_group(GroupTask(7, pickle.dumps(DATA), 4)) for _ in range(2)]
    rewards = [[episode.reward for episode in group.episodes] for group in groups]
    assert rewards[0] == rewards[1]
    assert len(set(rewards[0])) == 4
    assert workflow_context.get().seed is None


@pytest.mark.slow
async def test_agents_in_processes_sample_what_they_would_sample_here(start_worker: Any, seeds: Any) -> None:
    inline = await run_group(await start_worker(ThreeCalls(), seed=1))
    agent = AgentConfig(mode="subproc", subproc_max_workers=2)
    assert await run_group(await start_worker(ThreeCalls(), seed=1, agent=agent)) == inline


class FailsFirst(FakeEngine):
    """An engine whose first answer to each prompt is an error."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response = await super().agenerate(req)
        if sum(each.input_ids == req.input_ids for each in self.requests) == 1:
            raise EngineError("it failed")
        return response


@pytest.fixture
async def failing(tokenizer: Any) -> FailsFirst:
    return FailsFirst(vocab_size=len(tokenizer), max_positions=MAX_POSITIONS, tokenizer=tokenizer)


async def test_a_call_that_is_made_again_after_a_failure_has_its_seed_again(
    failing: FailsFirst, tokenizer: Any
) -> None:
    proxy = Proxy(failing, tokenizer, gconfig=GenerationHyperparameters(max_new_tokens=8), max_positions=MAX_POSITIONS)
    await proxy.start()
    session = proxy.open_session(seed=5)
    place = {"base_url": session.base_url, "api_key": session.api_key}
    with pytest.raises(InternalServerError):
        await chat(place, PROMPT)
    await chat(place, PROMPT)
    await chat(place, PROMPT)
    await proxy.aclose()
    failed, again, next_one = [request.gconfig.seed for request in failing.requests]
    assert failed == again != next_one


async def test_a_workflows_call_that_is_made_again_after_a_failure_has_its_seed_again(failing: FailsFirst) -> None:
    engine = RecordingEngine(failing, greedy=False, seed=5)
    request = ModelRequest("r", [5, 6, 7], GenerationHyperparameters(max_new_tokens=8))
    with pytest.raises(EngineError):
        await engine.agenerate(request)
    await engine.agenerate(request)
    await engine.agenerate(request)
    failed, again, next_one = [each.gconfig.seed for each in failing.requests]
    assert failed == again != next_one
