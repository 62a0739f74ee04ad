"""The engine behind an agent's two queues, and the record of everything it sampled for one episode.

Observations are answered concurrently, each as soon as its generations have ended. What is recorded here is trained,
and never what an agent hands back.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Hashable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from areal.api.engine_api import InferenceEngine
from areal.api.errors import AgentFailed, EpisodeRejected
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.messages import Array
from areal.config.rollout import GenerationHyperparameters
from realhf.api.core.agent_api import BundledGenerationOutputs

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""How long cancelled code may take to end before it is left behind."""


@dataclass(frozen=True)
class SampledGeneration:
    """One answer as the engine gave it."""

    index: int
    """Place in the episode, in order of finishing."""
    ids: Array
    """int32: prompt and answer."""
    start: int
    """Where the answer begins."""
    logprobs: Array
    """float32, of the answer's tokens."""
    versions: Array
    """int32, of the answer's tokens."""
    temperature: float
    truncated: bool

    @property
    def answer(self) -> slice:
        return slice(self.start, len(self.ids))

    def lies_on(self, ids: Array) -> bool:
        """Whether a sequence begins with this prompt and this answer."""
        return np.array_equal(ids[: len(self.ids)], self.ids)


class GenerationService:
    """Serves one episode. `record` holds its finished generations, `last` those of the latest bundle."""

    def __init__(self, engine: InferenceEngine, tokenizer: Any, stop_ids: list[int]) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self.obs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.act_queue: asyncio.Queue[BundledGenerationOutputs] = asyncio.Queue()
        self.record: list[SampledGeneration] = []
        self.last: list[SampledGeneration] = []

    async def serve_while(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, whose observations are answered meanwhile. Nothing of either runs on afterwards."""
        agent, server = asyncio.ensure_future(work), asyncio.ensure_future(self._serve())
        for task in (agent, server):  # one may fail after the other's failure was told
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
        qid, token_ids, gconfig = _parts(observation)
        asked = _for_engine(gconfig, self._stop_ids)
        async with asyncio.TaskGroup() as sampling:
            tasks = [
                sampling.create_task(self._generate(token_ids, asked.new(seed=_seed(asked.seed, number))))
                for number in range(getattr(gconfig, "n", 1))
            ]
        responses = [task.result() for task in tasks]
        self.last = [self._remember(response, asked) for response in responses]
        self.act_queue.put_nowait(_bundle(qid, responses))

    async def _generate(self, token_ids: Any, gconfig: GenerationHyperparameters) -> ModelResponse:
        response = await self._engine.agenerate(ModelRequest(uuid.uuid4().hex, token_ids, gconfig, self._tokenizer))
        if response.stop_reason == "abort" or not response.output_tokens:
            raise EpisodeRejected("the engine aborted a generation")
        return response

    def _remember(self, response: ModelResponse, asked: GenerationHyperparameters) -> SampledGeneration:
        generation = SampledGeneration(
            index=len(self.record),
            ids=np.array(response.input_tokens + response.output_tokens, np.int32),
            start=response.input_len,
            logprobs=np.array(response.output_logprobs, np.float32),
            versions=np.array(response.output_versions, np.int32),
            temperature=1.0 if asked.greedy else asked.temperature or 1.0,
            truncated=response.stop_reason != "stop",
        )
        self.record.append(generation)
        return generation


def _parts(observation: Any) -> tuple[Hashable, Any, GenerationHyperparameters]:
    if not isinstance(observation, tuple) or len(observation) != 3:
        raise AgentFailed(f"an observation must be (qid, token_ids, gconfig), got {observation!r:.200}")
    if not isinstance(observation[2], GenerationHyperparameters):
        raise AgentFailed(
            f"gconfig of an observation must be GenerationHyperparameters, got {type(observation[2]).__name__}; "
            "an agent whose constructor names `gconfig` is given one"
        )
    return observation


def _for_engine(gconfig: GenerationHyperparameters, stop_ids: list[int]) -> GenerationHyperparameters:
    """The settings as they travel: of the engine's own type, for one answer that ends where a turn ends."""
    plain = {each.name: getattr(gconfig, each.name) for each in fields(GenerationHyperparameters)}
    stops = list(dict.fromkeys([*gconfig.stop_token_ids, *stop_ids]))
    return GenerationHyperparameters(**{**plain, "n_samples": 1, "stop_token_ids": stops})


def _seed(seed: int | None, number: int) -> int | None:
    """Answers to one observation differ, with a seed too."""
    return None if seed is None else seed + number


def _bundle(qid: Hashable, responses: list[ModelResponse]) -> BundledGenerationOutputs:
    """Lists of its own: agents extend them."""
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
