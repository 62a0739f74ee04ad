"""One episode of an older agent, as a RolloutWorkflow of `areal`, so that the one executor runs it.

Answers the agent's observations from the engine, records every token that was sampled, and trains on nothing else: what
an agent returns chooses from the record (`trajectories`), it never replaces it.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Hashable
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import torch

from areal.api.engine_api import InferenceEngine
from areal.api.errors import AgentFailed, EpisodeRejected, NoInteractions, RewardInvalid, WorkflowError
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.reward_api import as_reward
from areal.api.workflow_api import RolloutWorkflow
from areal.config.rollout import GenerationHyperparameters
from areal.trajectory.rendering import Renderer
from areal.utils.callables import name_of
from realhf.api.core.agent_api import (
    Agent,
    BundledGenerationOutputs,
    EnvironmentService,
    LegacyGenerationHyperparameters,
    SequenceSample,
    constructor_arguments,
    question_id,
)
from realhf.trajectories import (
    SampledGeneration,
    TrainedSequence,
    Trajectories,
    sequences_of_record,
    sequences_of_sample,
)

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""How long cancelled code may take to end before it is abandoned."""


class LegacyWorkflow(RolloutWorkflow):
    """An older agent and its environment, made once per process.

    They arrive as classes, not as registered names: a worker has no registrations.
    """

    def __init__(
        self,
        agent: type[Agent],
        agent_args: dict[str, Any],
        env: type[EnvironmentService],
        env_args: dict[str, Any],
        turn_discount: float,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
    ) -> None:
        offered = {"gconfig": LegacyGenerationHyperparameters(**_settings(gconfig)), "tokenizer": tokenizer}
        self._agent = agent(**constructor_arguments(agent, agent_args, offered))
        self._env = env(**constructor_arguments(env, env_args, offered))
        self._turn_discount = turn_discount
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        ending = GenerationHyperparameters().new_with_stop_and_pad_token_ids(tokenizer)
        self._stop_ids = [*ending.stop_token_ids, *self._renderer.turn_end_ids]
        self._name = name_of(agent)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """A row for each sequence, as a dict of interactions."""
        prompt = _prompt(data, self._renderer)
        env = _WatchedEnvironment(self._env)
        service = _GenerationService(engine, self._tokenizer, self._stop_ids)
        collecting = self._agent.collect_trajectory(prompt, env, service.obs_queue, service.act_queue)
        try:
            collected = await service.serve_while(collecting)
        except EpisodeRejected:
            raise
        except Exception as error:
            raise AgentFailed(f"{self._name} raised {type(error).__name__}: {error}") from error
        trajectories = Trajectories(service.record, self._tokenizer, self._name)
        rows = [trajectories.add(sequence) for sequence in self._sequences(collected, service, env)]
        return {row.id: row for row in rows}

    def _sequences(
        self, collected: Any, service: "_GenerationService", env: "_WatchedEnvironment"
    ) -> list[TrainedSequence]:
        """What is to be trained; raises where that is nothing."""
        if collected is None:
            if not service.record:
                raise NoInteractions(f"{self._name} returned None and the engine generated nothing for it")
            rewards = env.last_rewards(len(service.last), self._name)
            return sequences_of_record(service.record, service.last, rewards, self._turn_discount)
        if not isinstance(collected, list):
            raise AgentFailed(
                f"{self._name} must return a list of SequenceSample or None, got {type(collected).__name__}"
            )
        if not collected:
            raise EpisodeRejected(f"{self._name} returned an empty list")
        return [sequence for sample in collected for sequence in sequences_of_sample(sample, self._name)]


def _prompt(task: dict[str, Any], renderer: Renderer) -> SequenceSample:
    """`messages` go through the chat template; a `prompt` is text that has its markup already."""
    if "messages" in task:
        text = renderer.render(task["messages"], None)
    elif isinstance(task.get("prompt"), str):
        text = task["prompt"]
    else:
        keys = ", ".join(map(repr, task)) or "none"
        raise WorkflowError(f"a task must have `messages`, or a `prompt` as text, got the keys {keys}")
    ids = renderer.encode(text)
    return SequenceSample(
        ids=[question_id(task)],
        data={"packed_prompts": torch.tensor(ids)},
        seqlens={"packed_prompts": [[len(ids)]]},
        metadata={"task": [task]},
    )


class _WatchedEnvironment(EnvironmentService):
    """The environment of one episode: every call goes through unchanged, and the last step's result is kept."""

    def __init__(self, env: EnvironmentService) -> None:
        self._env = env
        self._steps: list[Any] = []
        """The latest step's result; empty before the first."""

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        return await self._env.reset(*args, **kwargs)

    async def step(self, *args: Any, **kwargs: Any) -> Any:
        result = await self._env.step(*args, **kwargs)
        self._steps[:] = [result]
        return result

    def last_rewards(self, count: int, name: str) -> list[float]:
        """What the second entry of the last step's result gives to each of `count` answers."""
        if not self._steps:
            raise RewardInvalid(
                f"{name} returned None without a call of env.step, so there is no reward; "
                "return a list of SequenceSample, empty to reject the episode"
            )
        (result,) = self._steps
        source = f"env.step, whose last reward counts because {name} returned None"
        if not isinstance(result, tuple) or len(result) < 2:
            raise RewardInvalid(f"a step must return its reward as second entry, got {result!r:.200} from {source}")
        rewards = result[1].tolist() if hasattr(result[1], "tolist") else result[1]
        each = list(rewards) if isinstance(rewards, list | tuple) else [rewards] * count
        if len(each) != count:
            raise RewardInvalid(
                f"a step must give one reward, or one for each of {count} answers, got {result[1]!r:.200} from {source}"
            )
        return [as_reward(reward, source) for reward in each]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class _GenerationService:
    """Serves one episode's two queues from the engine.

    Observations are answered concurrently, each as soon as its generations have ended. `record` holds the finished
    generations of the episode, `last` those of the latest bundle.
    """

    def __init__(self, engine: InferenceEngine, tokenizer: Any, stop_ids: list[int]) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self.obs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.act_queue: asyncio.Queue[BundledGenerationOutputs] = asyncio.Queue()
        self.record: list[SampledGeneration] = []
        self.last: list[SampledGeneration] = []

    async def serve_while(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, whose observations are answered meanwhile. Neither runs on afterwards."""
        agent, server = asyncio.ensure_future(work), asyncio.ensure_future(self._serve())
        for task in (agent, server):  # one may fail after the other's failure was reported
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait((agent, server), return_when=asyncio.FIRST_COMPLETED)
            if not agent.done():
                server.result()  # it ends only by failing
            return agent.result()
        finally:
            agent.cancel()
            server.cancel()
            await asyncio.wait((agent, server), timeout=GRACE_SECONDS)

    async def _serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as answering:
                while True:
                    answering.create_task(self._answer(await self.obs_queue.get()))
        except ExceptionGroup as group:
            raise _first(group) from None

    async def _answer(self, observation: Any) -> None:
        qid, token_ids, gconfig = _checked(observation)
        stops = list(dict.fromkeys([*gconfig.stop_token_ids, *self._stop_ids]))
        settings = GenerationHyperparameters(**{**_settings(gconfig), "n_samples": 1, "stop_token_ids": stops})
        async with asyncio.TaskGroup() as sampling:
            tasks = [
                sampling.create_task(self._generate(token_ids, settings.new(seed=_seed(settings.seed, number))))
                for number in range(getattr(gconfig, "n", 1))
            ]
        responses = [task.result() for task in tasks]
        self.last = [self._remember(response, settings) for response in responses]
        self.act_queue.put_nowait(_bundle(qid, responses))

    async def _generate(self, token_ids: Any, settings: GenerationHyperparameters) -> ModelResponse:
        response = await self._engine.agenerate(ModelRequest(uuid.uuid4().hex, token_ids, settings, self._tokenizer))
        if response.stop_reason == "abort" or not response.output_tokens:
            raise EpisodeRejected("the engine aborted a generation")
        return response

    def _remember(self, response: ModelResponse, settings: GenerationHyperparameters) -> SampledGeneration:
        generation = SampledGeneration(
            index=len(self.record),
            ids=np.array(response.input_tokens + response.output_tokens, np.int32),
            start=response.input_len,
            logprobs=np.array(response.output_logprobs, np.float32),
            versions=np.array(response.output_versions, np.int32),
            temperature=settings.sampling_temperature,
            truncated=response.stop_reason != "stop",
        )
        self.record.append(generation)
        return generation


def _checked(observation: Any) -> tuple[Hashable, Any, GenerationHyperparameters]:
    if not isinstance(observation, tuple) or len(observation) != 3:
        raise AgentFailed(f"an observation must be (qid, token_ids, gconfig), got {observation!r:.200}")
    if not isinstance(observation[2], GenerationHyperparameters):
        raise AgentFailed(
            f"gconfig of an observation must be GenerationHyperparameters, got {type(observation[2]).__name__}; "
            "an agent whose constructor names `gconfig` is given one"
        )
    return observation


def _settings(gconfig: GenerationHyperparameters) -> dict[str, Any]:
    """The values of those fields that the engine knows."""
    return {each.name: getattr(gconfig, each.name) for each in fields(GenerationHyperparameters)}


def _seed(seed: int | None, number: int) -> int | None:
    """With a seed too, the answers to one observation differ."""
    return None if seed is None else (seed + number) % 2**64


def _bundle(qid: Hashable, responses: list[ModelResponse]) -> BundledGenerationOutputs:
    """Its lists are copies, because agents extend them."""
    return BundledGenerationOutputs(
        qid=qid,
        prompt_ids=list(responses[0].input_tokens),
        output_ids=[list(each.output_tokens) for each in responses],
        seqs=[each.input_tokens + each.output_tokens for each in responses],
        logprobs=[[0.0] * (each.input_len - 1) + each.output_logprobs for each in responses],
        no_eos=[each.stop_reason != "stop" for each in responses],
        version_start=[each.output_versions[0] for each in responses],
        version_end=[each.output_versions[-1] for each in responses],
    )


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
