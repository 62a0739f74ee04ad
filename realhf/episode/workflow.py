"""`LegacyWorkflow`: an older agent and its environment as a RolloutWorkflow, so that the one executor runs it."""

from dataclasses import fields
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import AgentFailed, EpisodeRejected, NoInteractions
from areal.api.workflow_api import RolloutWorkflow
from areal.config.generation import GenerationHyperparameters as EngineSettings
from areal.rollout.naming import name_of
from areal.trajectory.renderer import Renderer
from realhf.api.core.agent_api import Agent, GenerationHyperparameters
from realhf.api.core.env_api import EnvironmentService
from realhf.api.core.registry import make
from realhf.episode.environment import WatchedEnvironment
from realhf.episode.generations import GenerationService
from realhf.episode.prompts import prompt_of
from realhf.episode.sequences import TrainedSequence, read_sample, whole_record
from realhf.episode.trajectories import Trajectories


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
