"""One call answered: conversation to ids, ids to the engine, its tokens into the session's tree."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import EngineError
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.config.generation import GenerationHyperparameters
from areal.proxy.errors import engine_failed, from_engine, too_long
from areal.proxy.exchange import Call, Reply
from areal.proxy.sessions import Session
from areal.trajectory.answer import read_answer
from areal.trajectory.completion import Completion, Prompt
from areal.trajectory.parsers import hermes
from areal.trajectory.renderer import Renderer


def _unique_names() -> Iterator[str]:
    """Names that no other process gives, without asking the system for randomness on every call."""
    process = secrets.token_hex(6)
    return (f"{process}{number:08x}" for number in itertools.count())


@dataclass(frozen=True)
class Generation:
    engine: InferenceEngine
    renderer: Renderer
    max_positions: int
    model_name: str
    timeout_seconds: float
    _names: Iterator[str] = field(default_factory=_unique_names)

    def defaults(self, gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
        """A session's sampling: the config's, ending where the tokenizer or the template ends a turn."""
        ending = gconfig.new_with_stop_and_pad_token_ids(self.renderer.tokenizer)
        more = [token for token in self.renderer.turn_end_ids if token not in ending.stop_token_ids]
        return ending.new(stop_token_ids=[*ending.stop_token_ids, *more], n_samples=1)

    async def answer(self, session: Session, call: Call) -> Reply:
        """Raises ApiError. Cancelling it aborts the generation and leaves no trace in the tree."""
        try:
            prompt = session.tree.prompt(call.messages, call.tools)
            gconfig = self._sampling(session.gconfig, call, len(prompt.ids))
            async with asyncio.timeout(self.timeout_seconds):
                responses = await self._generate(prompt.ids, gconfig, call.n)
        except EngineError as error:
            raise from_engine(error) from error
        except TimeoutError as error:
            raise engine_failed(f"the engine gave no answer within {self.timeout_seconds:g} s") from error
        name = next(self._names)
        choices = [
            self._record(session, call, prompt, response, gconfig, name if choice == 0 else f"{name}-{choice}", choice)
            for choice, response in enumerate(responses)
        ]
        return Reply(
            id=choices[0].id,
            created=int(time.time()),
            model=call.model or self.model_name,
            prompt_tokens=len(prompt.ids),
            choices=choices,
            tokens=[self._token_texts(choice) for choice in choices] if call.logprobs else [],
        )

    def _sampling(self, base: GenerationHyperparameters, call: Call, prompt_length: int) -> GenerationHyperparameters:
        """The session's sampling with what the request asks for; logits are divided by 1 where nothing is sampled."""
        changes: dict[str, Any] = {"max_new_tokens": self._room(base, call, prompt_length)}
        changes["min_new_tokens"] = min(base.min_new_tokens, changes["max_new_tokens"])
        temperature = base.temperature if call.temperature is None else call.temperature
        greedy = temperature == 0 or (base.greedy and call.temperature is None)
        changes |= {"greedy": greedy, "temperature": 1.0 if greedy else temperature}
        if call.top_p is not None:
            changes["top_p"] = call.top_p
        if call.seed is not None:
            changes["seed"] = call.seed
        stop = base.stop if call.stop is None else call.stop
        one_tool_call = call.tools is not None and not call.parallel_tool_calls
        changes["stop"] = [*stop, hermes.CALL_END] if one_tool_call else stop
        return base.new(**changes)

    def _room(self, base: GenerationHyperparameters, call: Call, prompt_length: int) -> int:
        """How many tokens the answer may have."""
        left = self.max_positions - prompt_length
        if left < 1:
            raise too_long(
                f"the model has {self.max_positions} positions, the messages take {prompt_length} tokens and leave "
                "none for an answer; shorten them"
            )
        if call.max_tokens is None:
            return min(base.max_new_tokens, left)
        if call.max_tokens > left:
            raise too_long(
                f"the model has {self.max_positions} positions, the messages take {prompt_length} tokens and "
                f"{call.max_tokens} were asked for the answer; ask for at most {left}"
            )
        return call.max_tokens

    async def _generate(self, ids: list[int], gconfig: GenerationHyperparameters, n: int) -> list[ModelResponse]:
        if n == 1:
            return [await self._generate_one(ids, gconfig)]
        seeds = [None if gconfig.seed is None else gconfig.seed + choice for choice in range(n)]
        tasks = [asyncio.ensure_future(self._generate_one(ids, gconfig.new(seed=seed))) for seed in seeds]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate_one(self, ids: list[int], gconfig: GenerationHyperparameters) -> ModelResponse:
        response = await self.engine.agenerate(ModelRequest(next(self._names), ids, gconfig))
        count = len(response.output_tokens)
        if not count:
            raise EngineError(f"an answer must have at least one token, got none ({response.stop_reason})")
        if len(response.output_logprobs) != count or len(response.output_versions) != count:
            raise EngineError(
                f"an answer of {count} tokens must have as many log-probs and versions, got "
                f"{len(response.output_logprobs)} and {len(response.output_versions)}"
            )
        return response

    def _record(
        self,
        session: Session,
        call: Call,
        prompt: Prompt,
        response: ModelResponse,
        gconfig: GenerationHyperparameters,
        name: str,
        choice: int,
    ) -> Completion:
        answer = read_answer(
            self.renderer,
            response,
            completion_id=name,
            stop_ids=gconfig.stop_token_ids,
            stop_texts=session.gconfig.stop if call.stop is None else call.stop,
            parser=None if call.tools is None else hermes.parse,
        )
        return session.tree.add(
            prompt,
            response,
            answer,
            completion_id=f"chatcmpl-{name}",
            temperature=gconfig.temperature,
            choice=choice,
        )

    def _token_texts(self, completion: Completion) -> list[str]:
        return [self.renderer.decode([token]) for token in completion.output_ids.tolist()]
