"""How one call is sampled: the session's settings, changed by what the request asks for."""

# MERGED-DOC
# The conversation that a call stands for: what it sends, behind what it continues.
# One call answered: conversation to ids, ids to the engine, its tokens into the session's tree.

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import EngineError
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse, TokenChunk
from areal.config.rollout import GenerationHyperparameters
from areal.proxy.constraints import Constraints
from areal.proxy.errors import ApiError, bad_request, engine_failed, from_engine, too_long
from areal.proxy.sessions import Session
from areal.proxy.streaming import AnswerStream, byte_token_ids
from areal.proxy.types import Call, Event, Reply
from areal.trajectory.answer import read_answer
from areal.trajectory.completion import Completion, Prompt
from areal.trajectory.message import Message
from areal.trajectory.rendering import Renderer, Tools
from areal.trajectory.tree import Tree


def sampling(
    base: GenerationHyperparameters, call: Call, *, prompt_length: int, max_positions: int, call_end: str | None
) -> GenerationHyperparameters:
    """Logits are divided by 1 where nothing is sampled. `call_end` is a text to stop at behind the first tool call."""
    changes: dict[str, Any] = {"max_new_tokens": _room(base, call, prompt_length, max_positions)}
    changes["min_new_tokens"] = min(base.min_new_tokens, changes["max_new_tokens"])
    temperature = base.temperature if call.temperature is None else call.temperature
    greedy = temperature == 0 or (base.greedy and call.temperature is None)
    changes |= {"greedy": greedy, "temperature": 1.0 if greedy else temperature}
    asked = {"top_p": call.top_p, "top_k": call.top_k, "seed": call.seed}
    changes |= {name: value for name, value in asked.items() if value is not None}
    return base.new(**changes, stop=_stop(base, call, call_end))


def _stop(base: GenerationHyperparameters, call: Call, call_end: str | None) -> list[str]:
    stop = base.stop if call.stop is None else call.stop
    if call.tools is None or call.parallel_tool_calls or call_end is None:
        return stop  # where calls have no end to stop at, or something else must hold, a grammar sees to it
    return [*stop, call_end]


def _room(base: GenerationHyperparameters, call: Call, prompt_length: int, max_positions: int) -> int:
    """How many tokens the answer may have."""
    left = max_positions - prompt_length
    if left < 1:
        raise too_long(
            f"the model has {max_positions} positions, the messages take {prompt_length} tokens and leave "
            "none for an answer; shorten them"
        )
    if call.max_tokens is None:
        return min(base.max_new_tokens, left)
    if call.max_tokens > left:
        raise too_long(
            f"the model has {max_positions} positions, the messages take {prompt_length} tokens and "
            f"{call.max_tokens} were asked for the answer; ask for at most {left}"
        )
    return call.max_tokens


def conversation(session: Session, call: Call) -> list[Message]:
    """Raises ApiError 400 where it continues an answer that this session never gave."""
    system: list[Message] = []
    if call.instructions is not None:
        system = [{"role": "system", "content": call.instructions}]
    past = [] if call.continues is None else _past(session, call.continues)
    return [*system, *past, *call.messages]


def _past(session: Session, response_id: str) -> list[Message]:
    completion = session.tree.by_id(response_id)
    if completion is None:
        raise bad_request(
            f"previous_response_id must be the id of an answer of this session, got {response_id!r}",
            "previous_response_id",
            "previous_response_not_found",
        )
    messages = session.tree.conversation(completion)
    return messages[1:] if response_id in session.instructed else messages


def _unique_names() -> Iterator[str]:
    """Names that no other process gives, without asking the system for randomness on every call."""
    process = secrets.token_hex(6)
    return (f"{process}{number:08x}" for number in itertools.count())


@dataclass(frozen=True)
class _Question:
    """A call that is ready for the engine."""

    session: Session
    tree: Tree
    """Where its answers are recorded: the session's, when it was asked."""
    call: Call
    prompt: Prompt
    gconfig: GenerationHyperparameters
    grammar: Grammar | None
    """What the answer is held to while it is drawn."""
    name: str
    """What its answers are called, before the dialect's prefix."""
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def reply(self, choices: list[Completion], tokens: Sequence[list[str]] = ()) -> Reply:
        name = f"{self.call.id_prefix}{self.name}"
        return Reply(name, self.created, self.model, len(self.prompt.ids), choices, list(tokens))

    def request(self, name: str, gconfig: GenerationHyperparameters) -> ModelRequest:
        prompt = self.prompt
        return ModelRequest(name, prompt.ids, gconfig, grammar=self.grammar, images=prompt.images)

    @property
    def most_tokens(self) -> int:
        """What it may take, each choice with its own prompt."""
        return self.call.n * (len(self.prompt.ids) + self.gconfig.max_new_tokens)

    @property
    def stop_texts(self) -> list[str]:
        return self.session.gconfig.stop if self.call.stop is None else self.call.stop


class Generation:
    def __init__(
        self, engine: InferenceEngine, renderer: Renderer, max_positions: int, model_name: str, timeout_seconds: float
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.model_name = model_name
        self._max_positions = max_positions
        self._timeout_seconds = timeout_seconds
        self._names = _unique_names()
        self._byte_ids = byte_token_ids(renderer.tokenizer)
        added = getattr(renderer.tokenizer, "added_tokens_decoder", {})
        self._constraints = Constraints(renderer.format, {token.content: number for number, token in added.items()})

    def defaults(self, gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
        """A session's sampling: the config's, ending where the tokenizer or the template ends a turn."""
        ending = gconfig.new_with_stop_and_pad_token_ids(self.renderer.tokenizer)
        more = [token for token in self.renderer.turn_end_ids if token not in ending.stop_token_ids]
        return ending.new(stop_token_ids=[*ending.stop_token_ids, *more], n_samples=1)

    async def events(self, session: Session, call: Call) -> AsyncGenerator[Event, None]:
        """The answer as the call wants it: streamed, or its Reply alone."""
        if not call.stream:
            yield await self.answer(session, call)
            return
        async with aclosing(self.stream(session, call)) as events:
            async for event in events:
                yield event

    async def answer(self, session: Session, call: Call) -> Reply:
        """Raises ApiError. Cancelling it aborts the generation and leaves no trace in the tree."""
        try:
            question = await self._question(session, call)
            with session.budget.reserved(question.most_tokens) as taken:
                async with asyncio.timeout(self._timeout_seconds):
                    responses = await self._generate(question)
                taken += (len(question.prompt.ids) + len(response.output_tokens) for response in responses)
        except (EngineError, TimeoutError) as error:
            raise self._failure(error) from error
        return self._reply(question, [self._record(question, *numbered) for numbered in enumerate(responses)])

    async def stream(self, session: Session, call: Call) -> AsyncGenerator[Event, None]:
        """The same for one choice, while it is drawn; closing it does what cancelling does."""
        try:
            question = await self._question(session, call)
            with session.budget.reserved(question.most_tokens) as taken:
                async with aclosing(self._stream(question)) as events:
                    async for event in events:
                        yield event
                assert isinstance(event, Reply)
                taken.append(event.prompt_tokens + event.output_tokens)
        except (EngineError, TimeoutError) as error:
            raise self._failure(error) from error

    async def _stream(self, question: _Question) -> AsyncGenerator[Event, None]:
        said = AnswerStream(
            self.renderer,
            name=question.name,
            tools=question.prompt.tools,
            thinking=question.prompt.thinking,
            stop_ids=question.gconfig.stop_token_ids,
            stop_texts=question.stop_texts,
            byte_ids=self._byte_ids,
        )
        began = False
        async with aclosing(self._chunks(question)) as chunks:
            async for chunk in chunks:
                if not began:  # from here on a failure has no status of its own
                    yield question.reply([])
                    began = True
                if chunk.response is None:
                    for event in said.feed(chunk.tokens):
                        yield event
        assert chunk.response is not None
        completion = self._record(question, 0, _checked(chunk.response))
        for event in said.finish(completion.text):
            yield event
        yield self._reply(question, [completion])

    async def _chunks(self, question: _Question) -> AsyncGenerator[TokenChunk, None]:
        """The engine's, of which the last must come before the deadline."""
        request = question.request(question.name, question.gconfig)
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        async with aclosing(self.engine.astream(request)) as chunks:
            while True:
                async with asyncio.timeout_at(deadline):  # not around a yield: there it would hit whoever reads
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield chunk

    async def _question(self, session: Session, call: Call) -> _Question:
        if session.turns_kept is not None and len(session.tree.completions) >= session.turns_kept:
            session.tree = Tree(self.renderer)
            session.instructed.clear()
        tree = session.tree
        prompt = await _prompt(tree, conversation(session, call), call.tools)
        grammar = self._constraints.of(call, thinking=prompt.thinking)
        gconfig = sampling(
            session.gconfig,
            call,
            prompt_length=len(prompt.ids),
            max_positions=self._max_positions,
            call_end=None if grammar else self.renderer.format.calls.call_end,
        )
        model = call.model or self.model_name
        return _Question(session, tree, call, prompt, gconfig, grammar, next(self._names), model)

    async def _generate(self, question: _Question) -> list[ModelResponse]:
        if question.call.n == 1:
            return [await self._generate_one(question, question.gconfig)]
        seed = question.gconfig.seed
        seeds = [None if seed is None else seed + choice for choice in range(question.call.n)]
        tasks = [asyncio.ensure_future(self._generate_one(question, question.gconfig.new(seed=seed))) for seed in seeds]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate_one(self, question: _Question, gconfig: GenerationHyperparameters) -> ModelResponse:
        request = question.request(next(self._names), gconfig)
        return _checked(await self.engine.agenerate(request))

    def _record(self, question: _Question, choice: int, response: ModelResponse) -> Completion:
        name = question.name if choice == 0 else f"{question.name}-{choice}"
        answer = read_answer(
            self.renderer,
            response,
            completion_id=name,
            stop_ids=question.gconfig.stop_token_ids,
            stop_texts=question.stop_texts,
            tools=question.prompt.tools,
            thinking=question.prompt.thinking,
        )
        completion = question.tree.add(
            question.prompt,
            response,
            answer,
            completion_id=f"{question.call.id_prefix}{name}",
            temperature=question.gconfig.temperature,
            choice=choice,
        )
        if question.call.instructions is not None:
            question.session.instructed.add(completion.id)
        return completion

    def _reply(self, question: _Question, choices: list[Completion]) -> Reply:
        tokens = [self._token_texts(choice) for choice in choices] if question.call.logprobs else []
        return question.reply(choices, tokens)

    def _token_texts(self, completion: Completion) -> list[str]:
        return [self.renderer.decode([token]) for token in completion.output_ids.tolist()]

    def _failure(self, error: EngineError | TimeoutError) -> ApiError:
        if isinstance(error, EngineError):
            return from_engine(error)
        return engine_failed(f"the engine gave no answer within {self._timeout_seconds:g} s")


async def _prompt(tree: Tree, messages: list[Message], tools: Tools) -> Prompt:
    draft = tree.draft(messages, tools)
    # Pictures take too long for the loop; what is only text does not, and keeps its turn.
    ids = await asyncio.to_thread(tree.encode, draft) if draft.pictures else tree.encode(draft)
    return tree.settle(draft, ids)


def _checked(response: ModelResponse) -> ModelResponse:
    count = len(response.output_tokens)
    if not count:
        raise EngineError(f"an answer must have at least one token, got none ({response.stop_reason})")
    if len(response.output_logprobs) != count or len(response.output_versions) != count:
        raise EngineError(
            f"an answer of {count} tokens must have as many log-probs and versions, got "
            f"{len(response.output_logprobs)} and {len(response.output_versions)}"
        )
    return response
