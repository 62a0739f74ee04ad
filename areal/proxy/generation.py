"""One call answered: its conversation becomes ids, the engine continues them, the session's tree records the tokens."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import EngineError
from areal.api.io_struct import ModelResponse, TokenChunk
from areal.config.rollout import GenerationHyperparameters
from areal.proxy.constraints import LONG_SCHEMAS, Constraints, constrained_params
from areal.proxy.errors import ApiError, engine_failed, from_engine
from areal.proxy.prompts import PreparedCall, Prompts, sampling
from areal.proxy.sampled_tokens import TokenReports, TokenSpeller, reported
from areal.proxy.sessions import Session
from areal.proxy.streaming import AnswerStream, byte_token_ids
from areal.proxy.types import Call, Choice, Event, Reply, SampledToken, Tokens, ToolCallEvent
from areal.trajectory.answer import answer_text, read_answer
from areal.trajectory.message import ImageCache
from areal.trajectory.parsers.base import Reasoning, Text
from areal.trajectory.rendering import Renderer
from areal.trajectory.tree import Completion, Tree
from areal.utils.waits import WAITS_FOR_MODEL

QUEUED_CHUNKS = 64
"""How far the choices of a stream may run ahead of its reader."""
TIMEOUT_SETTING = "proxy.limits.call_timeout_seconds"


class Generation:
    """Answers the calls of all sessions with one engine."""

    def __init__(
        self, engine: InferenceEngine, renderer: Renderer, max_positions: int, model_name: str, timeout_seconds: float
    ) -> None:
        self.engine = engine
        self.model_name = model_name
        self._renderer = renderer
        self._max_positions = max_positions
        self._timeout_seconds = timeout_seconds
        self._names = _unique_names()
        self._defaults: tuple[GenerationHyperparameters, GenerationHyperparameters] | None = None
        """What `defaults` was asked last, and its answer."""
        self.prompts = Prompts(renderer, max_positions, timeout_seconds)
        self._byte_ids = byte_token_ids(renderer.tokenizer)
        self._speller = TokenSpeller(renderer)
        added = getattr(renderer.tokenizer, "added_tokens_decoder", {})
        self._constraints = Constraints(renderer.format, {token.content: number for number, token in added.items()})

    @property
    def images(self) -> ImageCache | None:
        """Where the images of calls are kept; None = the model takes none."""
        processor = self._renderer.image_processor
        return None if processor is None else processor.cache

    @property
    def thinks(self) -> bool:
        """The model marks its thinking."""
        return self._renderer.format.reasoning is not None

    @property
    def thinking_switch(self) -> bool:
        """A call may choose whether it thinks."""
        return self._renderer.thinking_switch

    def defaults(self, gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
        """A session's sampling: the config's, ending where the tokenizer or the template ends a turn."""
        if self._defaults is None or self._defaults[0] != gconfig:  # most sessions ask for the same
            self._defaults = gconfig.new(), self._with_ends(gconfig)
        return self._defaults[1]

    def _with_ends(self, gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
        ending = gconfig.new_with_stop_and_pad_token_ids(self._renderer.tokenizer)
        more = [token for token in self._renderer.turn_end_ids if token not in ending.stop_token_ids]
        return ending.new(stop_token_ids=[*ending.stop_token_ids, *more], n_samples=1)

    async def events(self, session: Session, call: Call) -> AsyncGenerator[Event, None]:
        """The answer as the call wants it: streamed, or as one Reply.

        Raises ApiError. Cancelling or closing it aborts the generation and leaves no trace in the tree.
        """
        try:
            prepared = await self._prepare(session, call)
            with _keeping_seed(prepared), session.budget.reserved(prepared.most_tokens) as taken:
                if call.stream:
                    async with aclosing(self._stream(prepared)) as events:
                        async for event in events:
                            yield event
                else:
                    event = await self._whole(prepared)
                    yield event
                assert isinstance(event, Reply)
                taken.append(len(event.choices) * event.prompt_tokens + event.output_tokens)
                if call.stores:
                    session.stored.put(call, event)
        except (EngineError, TimeoutError) as error:
            raise self._failure(error, call) from error

    async def _prepare(self, session: Session, call: Call) -> PreparedCall:
        if session.turns_kept is not None and len(session.tree.completions) >= session.turns_kept:
            session.tree = Tree(self._renderer)
            session.instructed.clear()
        tree = session.tree
        prompt = await self.prompts.place(session, tree, call)
        if call.size > LONG_SCHEMAS and self._constraints.takes_long(call, thinking=prompt.thinking):
            grammar = await self.prompts.in_background(self._constraints.of, call, thinking=prompt.thinking)
        else:
            grammar = self._constraints.of(call, thinking=prompt.thinking)
        call_end = None if grammar else self._renderer.format.calls.call_end
        gconfig = sampling(session, call, prompt, self._max_positions, call_end)
        model = call.model or self.model_name
        return PreparedCall(session, tree, call, prompt, gconfig, grammar, next(self._names), model)

    async def count_tokens(self, session: Session, call: Call) -> int:
        """Of the prompt that the call would have. Raises ApiError."""
        try:
            return len((await self.prompts.place(session, session.tree, call)).ids)
        except (EngineError, TimeoutError) as error:
            raise self._failure(error, call) from error

    async def _whole(self, prepared: PreparedCall) -> Reply:
        with prepared.session.waits.entered(WAITS_FOR_MODEL, self._timeout_seconds, TIMEOUT_SETTING):
            async with asyncio.timeout(self._timeout_seconds):
                responses = await self._generate(prepared)
        choices = [self._record(prepared, *numbered) for numbered in enumerate(responses)]
        if not prepared.call.logprobs:
            return prepared.reply(choices)
        return prepared.reply(choices, [self._told(prepared, response) for response in responses])

    async def _generate(self, prepared: PreparedCall) -> list[ModelResponse]:
        if prepared.call.n == 1:
            return [await self._generate_one(prepared)]
        tasks = [asyncio.ensure_future(self._generate_one(prepared, choice)) for choice in range(prepared.call.n)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _cancelled(tasks)

    async def _generate_one(self, prepared: PreparedCall, choice: int = 0) -> ModelResponse:
        return _checked(await self.engine.agenerate(prepared.request(next(self._names), choice)))

    async def _stream(self, prepared: PreparedCall) -> AsyncGenerator[Event, None]:
        streams = [_ChoiceStream(self, prepared, choice) for choice in range(prepared.call.n)]
        began, current = False, 0
        source = self._chunks(prepared) if len(streams) == 1 else self._chunks_of_all(prepared)
        async with aclosing(source) as chunks:
            async for choice, chunk in chunks:
                if not began:  # from here on a failure has no status of its own
                    yield prepared.reply([])
                    began = True
                if choice != current:
                    yield Choice(choice)
                    current = choice
                for event in streams[choice].events(chunk):
                    yield event
        choices = [self._record(prepared, each.choice, each.response) for each in streams]
        yield prepared.reply(choices, [each.told for each in streams] if prepared.call.logprobs else None)

    async def _chunks(self, prepared: PreparedCall, choice: int = 0) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """The engine's chunks of a choice, of which the last must come before the deadline."""
        request = prepared.request(next(self._names) if choice else prepared.name, choice)
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        async with aclosing(self.engine.astream(request)) as chunks:
            while True:
                with prepared.session.waits.entered(WAITS_FOR_MODEL, self._timeout_seconds, TIMEOUT_SETTING):
                    async with asyncio.timeout_at(deadline):  # not around a yield: there it would cancel the reader
                        chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield choice, chunk

    async def _chunks_of_all(self, prepared: PreparedCall) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """Those of every choice, as they come."""
        queue: asyncio.Queue[tuple[int, TokenChunk] | Exception] = asyncio.Queue(QUEUED_CHUNKS)

        async def forward(choice: int) -> None:
            try:
                async with aclosing(self._chunks(prepared, choice)) as chunks:
                    async for each in chunks:
                        await queue.put(each)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.ensure_future(forward(choice)) for choice in range(prepared.call.n)]
        try:
            unfinished = prepared.call.n
            while unfinished:
                each = await queue.get()  # every task has a deadline and tells of it
                if isinstance(each, Exception):
                    raise each
                unfinished -= each[1].response is not None
                yield each
        finally:
            await _cancelled(tasks)

    def reader(self, prepared: PreparedCall, choice: int = 0) -> AnswerStream:
        """What reads the answer while it comes."""
        return AnswerStream(
            self._renderer,
            name=prepared.choice_name(choice),
            tools=prepared.prompt.tools,
            thinking=prepared.prompt.thinking,
            stop_ids=prepared.gconfig.stop_token_ids,
            stop_texts=prepared.stop_texts,
            byte_ids=self._byte_ids,
        )

    def text_of(self, prepared: PreparedCall, response: ModelResponse) -> tuple[str, int]:
        """The answer's text, and of how many tokens it is: the end token is none of it."""
        text, end_id = answer_text(self._renderer, response, prepared.gconfig.stop_token_ids)
        return text, len(response.output_tokens) - (end_id is not None)

    def cuts_call(self, prepared: PreparedCall, response: ModelResponse) -> bool:
        """What may be the beginning of a call at the answer's end is not shown: it was cut off.

        Where calls have no mark, only an answer that must be one is known to have begun with it.
        """
        bare = self._renderer.format.calls.bare
        return response.stop_reason != "stop" and (not bare or prepared.call.tool_choice == "required")

    def reports(self) -> TokenReports:
        return TokenReports(self._speller)

    def _told(self, prepared: PreparedCall, response: ModelResponse) -> list[SampledToken]:
        text, count = self.text_of(prepared, response)
        return reported(self._speller, self.reader(prepared), response, text, count)

    def _record(self, prepared: PreparedCall, choice: int, response: ModelResponse) -> Completion:
        name = prepared.choice_name(choice)
        answer = read_answer(
            self._renderer,
            response,
            completion_id=name,
            stop_ids=prepared.gconfig.stop_token_ids,
            stop_texts=prepared.stop_texts,
            tools=prepared.prompt.tools,
            thinking=prepared.prompt.thinking,
            cut=self.cuts_call(prepared, response),
        )
        if beginning := prepared.call.prefill:  # the turn as it will come back; its first tokens are the prompt's
            answer.text = beginning + answer.text
            answer.message["content"] = beginning + answer.message["content"]
        completion = prepared.tree.add(
            prepared.prompt,
            response,
            answer,
            completion_id=f"{prepared.call.id_prefix}{name}",
            temperature=prepared.gconfig.sampling_temperature,
            choice=choice,
        )
        if prepared.call.instructions is not None:
            prepared.session.instructed.add(completion.id)
        return completion

    def _failure(self, error: EngineError | TimeoutError, call: Call) -> ApiError:
        if isinstance(error, EngineError):
            return from_engine(error, constrained_params(call)[0])
        return engine_failed(f"the engine gave no answer within {self._timeout_seconds:g} s")


@contextmanager
def _keeping_seed(prepared: PreparedCall) -> Iterator[None]:
    """A call that gets no answer in this block leaves its seed to the call that is made in its place."""
    try:
        yield
    finally:
        seeds, answered = prepared.session.seeds, prepared.tree.by_id(f"{prepared.call.id_prefix}{prepared.name}")
        if seeds is not None and answered is None:
            seeds.give_back(prepared.prompt.hash.digest(), prepared.gconfig.seed)


def _unique_names() -> Iterator[str]:
    """Names that no other process gives, without asking the system for randomness on every call."""
    process = secrets.token_hex(6)
    return (f"{process}{number:08x}" for number in itertools.count())


class _ChoiceStream:
    """One choice of a stream: chunks in, events out."""

    def __init__(self, generation: Generation, prepared: PreparedCall, choice: int) -> None:
        self.choice = choice
        self.told: list[SampledToken] = []
        """The tokens that were reported."""
        self._response: ModelResponse | None = None
        self._generation = generation
        self._prepared = prepared
        self._reader = generation.reader(prepared, choice)
        self._reports = generation.reports() if prepared.call.logprobs else None

    @property
    def response(self) -> ModelResponse:
        """The whole answer, once it is."""
        assert self._response is not None
        return self._response

    def events(self, chunk: TokenChunk) -> Iterator[Event]:
        if chunk.response is None:
            self._note(chunk, len(chunk.tokens))
            yield from self._with_tokens(self._reader.feed(chunk.tokens))
            return
        self._response = _checked(chunk.response)
        text, count = self._generation.text_of(self._prepared, self._response)
        ended = len(self._response.output_tokens) - count
        self._note(chunk, len(chunk.tokens) - ended)
        cut = self._generation.cuts_call(self._prepared, self._response)
        yield from self._with_tokens(self._reader.finish(text, cut=cut))
        if self._reports is not None and (rest := self._taken(of_text=False)):
            yield Tokens(rest)

    def _note(self, chunk: TokenChunk, count: int) -> None:
        if self._reports is not None and count > 0:
            self._reports.add(chunk.tokens[:count], chunk.logprobs[:count], chunk.alternatives[:count])

    def _with_tokens(self, events: Iterator[Text | Reasoning | ToolCallEvent]) -> Iterator[Event]:
        for event in events:
            if self._reports is not None and (taken := self._taken(of_text=isinstance(event, Text))):
                yield Tokens(taken)
            yield event

    def _taken(self, *, of_text: bool) -> list[SampledToken]:
        assert self._reports is not None
        taken = self._reports.take(of_text=of_text)
        self.told += taken
        return taken


async def _cancelled(tasks: "list[asyncio.Task[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
