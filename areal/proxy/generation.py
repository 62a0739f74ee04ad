"""One call answered: its conversation becomes ids, the engine continues them, the session's tree records the tokens."""

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import orjson

from areal.api.engine_api import InferenceEngine
from areal.api.errors import EngineError
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse, TokenChunk
from areal.config.rollout import GenerationHyperparameters
from areal.proxy.constraints import LONG_SCHEMAS, Constraints, constrained_params
from areal.proxy.errors import ApiError, bad_request, engine_failed, from_engine, too_long
from areal.proxy.sessions import Session
from areal.proxy.streaming import AnswerStream, byte_token_ids
from areal.proxy.types import Call, Event, Reply
from areal.trajectory.answer import read_answer
from areal.trajectory.matching import ConversationCache
from areal.trajectory.message import ImageCache, Message
from areal.trajectory.parsers.base import Tools
from areal.trajectory.rendering import LONG_TEXT, Renderer
from areal.trajectory.tree import Completion, Draft, Prompt, Tree
from areal.utils.background import Background
from areal.utils.shorten import shown
from areal.utils.waits import WAITS_FOR_MODEL

P = ParamSpec("P")
T = TypeVar("T")

LONG_CALL = 1 << 16
"""Bytes of new messages and tools beyond which it takes tens of milliseconds to read and render them."""
LONG_CALLS_AT_ONCE = 2
TIMEOUT_SETTING = "proxy.limits.call_timeout_seconds"


@dataclass(frozen=True)
class _PreparedCall:
    """A call that is ready for the engine."""

    session: Session
    tree: Tree
    """Where its answers are recorded: the session's at the time of the call."""
    call: Call
    prompt: Prompt
    gconfig: GenerationHyperparameters
    grammar: Grammar | None
    """What the answer must follow."""
    name: str
    """The id of its answer without the dialect's prefix."""
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def reply(self, choices: list[Completion], tokens: Sequence[list[str]] = ()) -> Reply:
        reply_id = f"{self.call.id_prefix}{self.name}"
        return Reply(reply_id, self.created, self.model, len(self.prompt.ids), choices, list(tokens))

    def request(self, name: str, gconfig: GenerationHyperparameters) -> ModelRequest:
        images = [image.data for image in self.prompt.images]
        return ModelRequest(
            name, self.prompt.ids, gconfig, grammar=self.grammar, images=images, session=self.session.name
        )

    @property
    def most_tokens(self) -> int:
        """What it may take; each choice counts its own prompt."""
        return self.call.n * (len(self.prompt.ids) + self.gconfig.max_new_tokens)

    @property
    def stop_texts(self) -> list[str]:
        return self.session.gconfig.stop if self.call.stop is None else self.call.stop


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
        self._background = Background(LONG_CALLS_AT_ONCE, "areal long call")
        self._byte_ids = byte_token_ids(renderer.tokenizer)
        added = getattr(renderer.tokenizer, "added_tokens_decoder", {})
        self._constraints = Constraints(renderer.format, {token.content: number for number, token in added.items()})

    @property
    def images(self) -> ImageCache | None:
        """Where the images of calls are kept; None = the model takes none."""
        processor = self._renderer.image_processor
        return None if processor is None else processor.cache

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
        except (EngineError, TimeoutError) as error:
            raise self._failure(error, call) from error

    async def _prepare(self, session: Session, call: Call) -> _PreparedCall:
        if session.turns_kept is not None and len(session.tree.completions) >= session.turns_kept:
            session.tree = Tree(self._renderer)
            session.instructed.clear()
        tree = session.tree
        prompt = await self._prompt(tree, _conversation(session, call), call)
        if call.size > LONG_SCHEMAS and self._constraints.takes_long(call, thinking=prompt.thinking):
            grammar = await self.in_background(self._constraints.of, call, thinking=prompt.thinking)
        else:
            grammar = self._constraints.of(call, thinking=prompt.thinking)
        call_end = None if grammar else self._renderer.format.calls.call_end
        gconfig = _sampling(session, call, prompt, self._max_positions, call_end)
        model = call.model or self.model_name
        return _PreparedCall(session, tree, call, prompt, gconfig, grammar, next(self._names), model)

    async def _prompt(self, tree: Tree, messages: list[Message], call: Call) -> Prompt:
        """The call placed in the tree. What would keep the event loop from other calls is done in a thread."""
        if call.size > LONG_CALL and _weight([tree.unread(messages), call.tools]) > LONG_CALL:
            conversations = ConversationCache()
            draft = await self.in_background(self._long_draft, tree, messages, call.tools, conversations)
            tree.remember(conversations)
        else:
            draft = tree.draft(messages, call.tools)
        if draft.images or len(draft.text) > LONG_TEXT:
            ids = await self.in_background(tree.encode, draft, self._max_positions)
        else:
            ids = tree.encode(draft)
        return tree.settle(draft, ids)

    def _long_draft(
        self, tree: Tree, messages: list[Message], tools: Tools | None, conversations: ConversationCache
    ) -> Draft:
        self._renderer.require_room(messages, tools, self._max_positions)
        return tree.draft(messages, tools, conversations)

    async def in_background(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """For what takes long because the call is long. Raises ApiError 503 if it takes longer than a call may."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._background.run(work, *args, **kwargs)
        except TimeoutError:
            raise engine_failed(f"a long call was not read within {self._timeout_seconds:g} s") from None

    async def _whole(self, prepared: _PreparedCall) -> Reply:
        with prepared.session.waits.entered(WAITS_FOR_MODEL, self._timeout_seconds, TIMEOUT_SETTING):
            async with asyncio.timeout(self._timeout_seconds):
                responses = await self._generate(prepared)
        return self._reply(prepared, [self._record(prepared, *numbered) for numbered in enumerate(responses)])

    async def _generate(self, prepared: _PreparedCall) -> list[ModelResponse]:
        if prepared.call.n == 1:
            return [await self._generate_one(prepared, prepared.gconfig)]
        seed = prepared.gconfig.seed
        seeds = [None if seed is None else (seed + choice) % 2**64 for choice in range(prepared.call.n)]
        tasks = [asyncio.ensure_future(self._generate_one(prepared, prepared.gconfig.new(seed=seed))) for seed in seeds]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate_one(self, prepared: _PreparedCall, gconfig: GenerationHyperparameters) -> ModelResponse:
        request = prepared.request(next(self._names), gconfig)
        return _checked(await self.engine.agenerate(request))

    async def _stream(self, prepared: _PreparedCall) -> AsyncGenerator[Event, None]:
        answer = AnswerStream(
            self._renderer,
            name=prepared.name,
            tools=prepared.prompt.tools,
            thinking=prepared.prompt.thinking,
            stop_ids=prepared.gconfig.stop_token_ids,
            stop_texts=prepared.stop_texts,
            byte_ids=self._byte_ids,
        )
        began = False
        async with aclosing(self._chunks(prepared)) as chunks:
            async for chunk in chunks:
                if not began:  # from here on a failure has no status of its own
                    yield prepared.reply([])
                    began = True
                if chunk.response is None:
                    for event in answer.feed(chunk.tokens):
                        yield event
        assert chunk.response is not None
        completion = self._record(prepared, 0, _checked(chunk.response))
        for event in answer.finish(completion.text):
            yield event
        yield self._reply(prepared, [completion])

    async def _chunks(self, prepared: _PreparedCall) -> AsyncGenerator[TokenChunk, None]:
        """The engine's chunks, of which the last must come before the deadline."""
        request = prepared.request(prepared.name, prepared.gconfig)
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        async with aclosing(self.engine.astream(request)) as chunks:
            while True:
                with prepared.session.waits.entered(WAITS_FOR_MODEL, self._timeout_seconds, TIMEOUT_SETTING):
                    async with asyncio.timeout_at(deadline):  # not around a yield: there it would cancel the reader
                        chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield chunk

    def _record(self, prepared: _PreparedCall, choice: int, response: ModelResponse) -> Completion:
        name = prepared.name if choice == 0 else f"{prepared.name}-{choice}"
        answer = read_answer(
            self._renderer,
            response,
            completion_id=name,
            stop_ids=prepared.gconfig.stop_token_ids,
            stop_texts=prepared.stop_texts,
            tools=prepared.prompt.tools,
            thinking=prepared.prompt.thinking,
        )
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

    def _reply(self, prepared: _PreparedCall, choices: list[Completion]) -> Reply:
        tokens = [self._token_texts(choice) for choice in choices] if prepared.call.logprobs else []
        return prepared.reply(choices, tokens)

    def _token_texts(self, completion: Completion) -> list[str]:
        return [self._renderer.decode([token]) for token in completion.output_ids.tolist()]

    def _failure(self, error: EngineError | TimeoutError, call: Call) -> ApiError:
        if isinstance(error, EngineError):
            return from_engine(error, constrained_params(call)[0])
        return engine_failed(f"the engine gave no answer within {self._timeout_seconds:g} s")


@contextmanager
def _keeping_seed(prepared: _PreparedCall) -> Iterator[None]:
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


def _conversation(session: Session, call: Call) -> list[Message]:
    """What the call sends, after what it continues. Raises ApiError 400 if that is not an answer of this session."""
    system: list[Message] = []
    if call.instructions is not None:
        system = [{"role": "system", "content": call.instructions}]
    past = [] if call.continues is None else _past(session, call.continues)
    return [*system, *past, *call.messages] if system or past else call.messages


def _past(session: Session, response_id: str) -> list[Message]:
    completion = session.tree.by_id(response_id)
    if completion is None:
        raise bad_request(
            f"previous_response_id must be the id of an answer of this session, got {shown(response_id)}",
            "previous_response_id",
            "previous_response_not_found",
        )
    messages = session.tree.conversation(completion)
    return messages[1:] if response_id in session.instructed else messages


def _weight(value: Any) -> float:
    """Bytes of JSON, without images."""
    try:
        return len(orjson.dumps(value, default=lambda image: None))
    except TypeError:  # numbers beyond 64 bits
        return math.inf


def _sampling(
    session: Session, call: Call, prompt: Prompt, max_positions: int, call_end: str | None
) -> GenerationHyperparameters:
    """The session's settings, changed by what the call asks for; `call_end` is the text that ends a tool call."""
    base = session.gconfig
    changes: dict[str, Any] = {"max_new_tokens": _max_new_tokens(base, call, len(prompt.ids), max_positions)}
    changes["min_new_tokens"] = min(base.min_new_tokens, changes["max_new_tokens"])
    if call.temperature is not None:
        changes |= {"greedy": False, "temperature": call.temperature}
    seed = base.seed if call.seed is None else call.seed
    if session.seeds is not None:
        seed = session.seeds.next(prompt.hash.digest(), seed)  # a call that is refused before this takes none
    asked = {"top_p": call.top_p, "top_k": call.top_k, "seed": seed}
    changes |= {name: value for name, value in asked.items() if value is not None}
    sampling = base.new(**changes, stop=_stop(base, call, call_end))
    # Nothing is drawn by a greedy answer; its log-probs are those of temperature 1.
    return sampling.new(greedy=True, temperature=1.0) if sampling.is_greedy else sampling


def _max_new_tokens(base: GenerationHyperparameters, call: Call, prompt_length: int, max_positions: int) -> int:
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


def _stop(base: GenerationHyperparameters, call: Call, call_end: str | None) -> list[str]:
    stop = base.stop if call.stop is None else call.stop
    if call.tools is None or call.parallel_tool_calls or call_end is None:
        return stop  # if tool calls have no end of their own, or more is demanded, a grammar ends the answer
    return [*stop, call_end]


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
