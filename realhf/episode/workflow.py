"""The id that a question goes by, for those who put it and those who judge the answers."""

# MERGED-DOC
# A task of a dataset as an agent meets it: a question's id and its tokens.
# The environment as one episode sees it: every call goes through as it is, and the last reward is remembered.
# `LegacyWorkflow`: an older agent and its environment as a RolloutWorkflow, so that the one executor runs it.

import math
import numbers
from dataclasses import fields
from typing import Any

import torch

from areal.api.engine_api import InferenceEngine
from areal.api.errors import AgentFailed, EpisodeRejected, NoInteractions, RewardInvalid, WorkflowError
from areal.api.workflow_api import RolloutWorkflow
from areal.config.rollout import GenerationHyperparameters as EngineSettings
from areal.trajectory.rendering import Renderer
from areal.utils.callables import name_of
from realhf.api.core.agent_api import Agent, EnvironmentService, GenerationHyperparameters, SequenceSample, make
from realhf.episode.generations import GenerationService
from realhf.episode.tasks import qid_of
from realhf.episode.trajectories import TrainedSequence, Trajectories, read_sample, whole_record


def prompt_of(task: dict[str, Any], renderer: Renderer) -> SequenceSample:
    """`messages` go through the chat template; a `prompt` is text that has been through one."""
    if "messages" in task:
        text = renderer.render(task["messages"], None)
    elif isinstance(task.get("prompt"), str):
        text = task["prompt"]
    else:
        keys = ", ".join(map(repr, task)) or "none"
        raise WorkflowError(f"a task must have `messages`, or a `prompt` as text, got the keys {keys}")
    ids = renderer.encode(text)
    return SequenceSample(
        ids=[qid_of(task)],
        data={"packed_prompts": torch.tensor(ids)},
        seqlens={"packed_prompts": [[len(ids)]]},
        metadata={"task": [task]},
    )


class WatchedEnvironment(EnvironmentService):
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
        """What the last step's second entry gives to each of `count` answers."""
        if not self._steps:
            raise RewardInvalid(
                f"{name} returned None without a call of env.step, so there is no reward; "
                "return a list of SequenceSample, empty to reject the episode"
            )
        (result,) = self._steps
        if not isinstance(result, tuple) or len(result) < 2:
            raise RewardInvalid(
                f"{name} returned None, and env.step gave {result!r:.200}; a step's second entry is the reward"
            )
        rewards = result[1].tolist() if hasattr(result[1], "tolist") else result[1]
        each = [_plain(one) for one in (rewards if isinstance(rewards, list | tuple) else [rewards] * count)]
        if len(each) != count or not all(isinstance(one, numbers.Real) and math.isfinite(one) for one in each):
            raise RewardInvalid(
                f"{name} returned None, and env.step gave the reward {result[1]!r:.200}; it must be a finite "
                f"number, or one for each of {count} answers"
            )
        return [float(one) for one in each]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def _plain(number: Any) -> Any:
    """numpy and torch scalars are numbers too."""
    return number.item() if getattr(number, "ndim", None) == 0 else number


class LegacyWorkflow(RolloutWorkflow):
    """Agent and environment are made once per process. Classes travel, not names: a worker has no registrations."""

    def __init__(
        self,
        agent: type[Agent],
        agent_args: dict[str, Any],
        env: type[EnvironmentService],
        env_args: dict[str, Any],
        turn_discount: float,
        gconfig: EngineSettings,
        tokenizer: Any,
    ) -> None:
        own = {each.name: getattr(gconfig, each.name) for each in fields(EngineSettings)}
        offered = {"gconfig": GenerationHyperparameters(**own), "tokenizer": tokenizer}
        self._agent: Agent = make(agent, agent_args, offered)
        self._env: EnvironmentService = make(env, env_args, offered)
        self._turn_discount = turn_discount
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        ending = EngineSettings().new_with_stop_and_pad_token_ids(tokenizer)
        self._stop_ids = [*ending.stop_token_ids, *self._renderer.turn_end_ids]
        self._name = name_of(agent)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """A row for each sequence, as a dict of interactions."""
        prompt = prompt_of(data, self._renderer)
        env = WatchedEnvironment(self._env)
        service = GenerationService(engine, self._tokenizer, self._stop_ids)
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

    def _sequences(self, collected: Any, service: GenerationService, env: WatchedEnvironment) -> list[TrainedSequence]:
        """What is to be trained; raises where that is nothing."""
        if collected is None:
            if not service.record:
                raise NoInteractions(f"{self._name} returned None and the engine generated nothing for it")
            rewards = env.last_rewards(len(service.last), self._name)
            return whole_record(service.record, service.last, rewards, self._turn_discount)
        if not isinstance(collected, list):
            raise AgentFailed(
                f"{self._name} must return a list of SequenceSample or None, got {type(collected).__name__}"
            )
        if not collected:
            raise EpisodeRejected(f"{self._name} returned an empty list")
        return [sequence for sample in collected for sequence in read_sample(sample, self._name)]
