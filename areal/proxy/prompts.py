"""A call made ready for the engine: placed in its session's tree, with the ids to continue, and how it is sampled.

`Prompts` finds which conversation a call goes on. Work that would keep the event loop from other calls is done in a
thread. `PreparedCall` is what the engine is asked.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import orjson

from areal.api.errors import ContextLengthError
from areal.api.io_struct import Grammar, ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.proxy.errors import ApiError, bad_request, engine_failed, too_long
from areal.proxy.sessions import Session
from areal.proxy.types import Call, Reply, SampledToken
from areal.trajectory.matching import ConversationCache
from areal.trajectory.message import Message
from areal.trajectory.rendering import LONG_TEXT, Renderer
from areal.trajectory.tree import Completion, Draft, Prompt, Tree
from areal.utils.background import Background
from areal.utils.shorten import shown

P = ParamSpec("P")
T = TypeVar("T")

LONG_CALL = 1 << 16
"""Bytes of new messages and tools beyond which it takes tens of milliseconds to read and render them."""
LONG_CALLS_AT_ONCE = 2


class Prompts:
    """Places the calls of all sessions of one model."""

    def __init__(self, renderer: Renderer, max_positions: int, timeout_seconds: float) -> None:
        self._renderer = renderer
        self._max_positions = max_positions
        self._timeout_seconds = timeout_seconds
        self._background = Background(LONG_CALLS_AT_ONCE, "areal long call")

    async def place(self, session: Session, tree: Tree, call: Call) -> Prompt:
        """Raises ApiError 400, and EngineError for what the model cannot take."""
        if call.raw_prompt is not None:
            return await self._place_raw(tree, call.raw_prompt)
        messages = _conversation(session, call)
        if call.truncates:
            return await self._place_end(tree, messages, call)
        return await self._place(tree, messages, call)

    async def in_background(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """For what takes long because the call is long. Raises ApiError 503 if it takes longer than a call may."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._background.run(work, *args, **kwargs)
        except TimeoutError:
            raise engine_failed(f"a long call was not read within {self._timeout_seconds:g} s") from None

    async def _place(self, tree: Tree, messages: list[Message], call: Call) -> Prompt:
        if call.size > LONG_CALL and _weight([tree.unread(messages), call.tools]) > LONG_CALL:
            conversations = ConversationCache()
            draft = await self.in_background(self._long_draft, tree, messages, call, conversations)
            tree.remember(conversations)
        else:
            draft = tree.draft(messages, call.tools, thinks=call.thinks)
        if call.prefill:
            draft = self._begun(draft, call.prefill)
        if draft.images or len(draft.text) > LONG_TEXT:
            ids = await self.in_background(tree.encode, draft, self._max_positions)
        else:
            ids = tree.encode(draft)
        return tree.settle(draft, ids)

    def _long_draft(self, tree: Tree, messages: list[Message], call: Call, conversations: ConversationCache) -> Draft:
        self._renderer.require_room(messages, call.tools, self._max_positions)
        return tree.draft(messages, call.tools, conversations, call.thinks)

    def _begun(self, draft: Draft, beginning: str) -> Draft:
        if draft.thinking:
            raise bad_request(
                "messages must not end with the assistant: this model begins its answer with thinking, which cannot be "
                "begun for it; end with the user's message, or turn thinking off",
                "messages",
            )
        draft.text = self._renderer.begin_answer(draft.text, beginning)
        return draft

    async def _place_raw(self, tree: Tree, raw: str | list[int]) -> Prompt:
        text = raw if isinstance(raw, str) else self._renderer.decode(raw)
        draft = tree.raw_draft(text)
        if not isinstance(raw, str):
            ids = raw
        elif len(text) > LONG_TEXT:
            ids = await self.in_background(self._renderer.encode_raw, text, self._max_positions)
        else:
            ids = self._renderer.encode_raw(text, self._max_positions)
        if not ids:
            raise bad_request("prompt must have at least one token, got none", "prompt")
        return tree.settle(draft, ids)

    async def _place_end(self, tree: Tree, messages: list[Message], call: Call) -> Prompt:
        """With as many of the latest questions as fit; what was said before the first of them is left out."""
        first = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
        begins = [first, *(at for at in range(first + 1, len(messages)) if messages[at]["role"] == "user")]
        if (whole := await self._fitting(tree, messages, call)) is not None:
            return whole
        best, low, high = None, 1, len(begins)
        while low < high:
            middle = (low + high) // 2
            prompt = await self._fitting(tree, [*messages[:first], *messages[begins[middle] :]], call)
            if prompt is None:
                low = middle + 1
            else:
                best, high = prompt, middle
        return best or await self._place(tree, messages, call)  # not even the last question fits: that is an error

    async def _fitting(self, tree: Tree, messages: list[Message], call: Call) -> Prompt | None:
        try:
            prompt = await self._place(tree, messages, call)
        except ContextLengthError:
            return None
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return prompt if len(prompt.ids) + (call.max_tokens or 1) <= self._max_positions else None


def _conversation(session: Session, call: Call) -> list[Message]:
    """What the call sends, after what it continues. Raises ApiError 400 if that is not an answer of this session."""
    system: list[Message] = []
    if call.instructions is not None:
        system = [{"role": "system", "content": call.instructions}]
    past = [] if call.continues is None else _past(session, call.continues)
    return [*system, *past, *call.messages] if system or past else call.messages


def _past(session: Session, response_id: str) -> list[Message]:
    completion = session.tree.by_id(response_id)
    if completion is None or response_id in session.stored.deleted:
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


@dataclass(frozen=True)
class PreparedCall:
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

    def reply(self, choices: list[Completion], tokens: list[list[SampledToken]] | None = None) -> Reply:
        reply_id = f"{self.call.id_prefix}{self.name}"
        return Reply(reply_id, self.created, self.model, len(self.prompt.ids), choices, tokens or [], self.call.prefill)

    def request(self, name: str, choice: int = 0) -> ModelRequest:
        images = [image.data for image in self.prompt.images]
        gconfig = self.gconfig
        if choice and gconfig.seed is not None:
            gconfig = gconfig.new(seed=(gconfig.seed + choice) % 2**64)
        return ModelRequest(
            name,
            self.prompt.ids,
            gconfig,
            grammar=self.grammar,
            images=images,
            session=self.session.name,
            top_logprobs=self.call.top_logprobs,
            steering=self.call.steering,
        )

    def choice_name(self, choice: int) -> str:
        """The id of that answer without the dialect's prefix."""
        return self.name if choice == 0 else f"{self.name}-{choice}"

    @property
    def most_tokens(self) -> int:
        """What it may take; each choice counts its own prompt."""
        return self.call.n * (len(self.prompt.ids) + self.gconfig.max_new_tokens)

    @property
    def stop_texts(self) -> list[str]:
        return self.session.gconfig.stop if self.call.stop is None else self.call.stop


def sampling(
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
    settings = base.new(**changes, stop=_stop(base, call, call_end))
    # Nothing is drawn by a greedy answer; its log-probs are those of temperature 1.
    return settings.new(greedy=True, temperature=1.0) if settings.is_greedy else settings


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
