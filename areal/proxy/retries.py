"""Which calls of a session are one and the same, and the answer that a call shares with its retries.

A retry gets the answer of the call it repeats; no second one is sampled. A call is a retry if it has an SDK's retry
header (and the same body) or an `Idempotency-Key` that was used before. With neither, the same body is a retry only
after an answer that was recorded but never reached its client: the same body sent twice on purpose is two samples.

A client that disconnects while its answer is generated leaves no answer: the generation is aborted. Such a call, and
one that failed, stays on the list as unanswered, so that its retry is not mistaken for that of another call that
happened to have the same body.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Self

from areal.proxy.errors import ApiError
from areal.proxy.requests import Head
from areal.proxy.types import Choice, Event, Reply, Tokens, ToolCallEvent
from areal.trajectory.message import Message, arguments_text
from areal.trajectory.parsers.base import Reasoning, Text
from areal.utils.shorten import shown

ABORT_SECONDS = 5.0


@dataclass(frozen=True)
class Attempt:
    """What a call shares with its retries."""

    digest: bytes
    """Its route, and the digest of its body."""
    retry: int
    """0 = the first attempt, or no retry header."""
    key: str | None

    @classmethod
    def of(cls, route: str, body_digest: bytes, head: Head) -> Self:
        count = head.retry_count
        retry = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0
        return cls(route.encode() + b"\0" + body_digest, retry, head.idempotency_key or None)


class SharedAnswer:
    """One answer for all who ask for it: the client that asked first, and its retries.

    Listen inside `async with`, and call `delivered` once the whole answer was sent. It is generated in a task of its
    own, so that it outlives each of its listeners, and aborted when the last one leaves. A finished answer is kept as
    the recorded `reply`, from which its events are made again for a later listener.
    """

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        """The last event is the Reply with its choices."""
        self.reply: Reply | None = None
        """Set once the answer is whole."""
        self._events: list[Event] = []
        self._waiting: list[asyncio.Future[None]] = []
        """Listeners that wait for what comes next."""
        self._listeners = 0
        self._delivered = False
        self._aborted = False
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = asyncio.ensure_future(self._collect(events))
        self._task.add_done_callback(self._end)

    @property
    def unanswered(self) -> bool:
        """It failed or was aborted: nothing was recorded, and its client may ask again."""
        return self.reply is None and (self._aborted or self._task is None)

    @property
    def lost(self) -> bool:
        """It was recorded but reached no client, and none is waiting for it."""
        return self.reply is not None and not self._delivered and not self._listeners

    @property
    def was_delivered(self) -> bool:
        return self._delivered

    def delivered(self) -> None:
        self._delivered = True

    async def __aenter__(self) -> Self:
        self._listeners += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._listeners -= 1
        task = self._task
        if self._listeners == 0 and self.reply is None and task is not None:
            self._aborted = task.cancel()
            await asyncio.wait((task,), timeout=ABORT_SECONDS)
        self._settle()

    @property
    def running(self) -> bool:
        """More may come."""
        return self.reply is None and self._task is not None

    def news(self) -> asyncio.Future[None]:
        """Done when more has come, or the answer has ended. A listener may cancel its own."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(news)
        return news

    def result(self) -> Reply:
        """The whole answer, or its failure, once it has ended."""
        if self.reply is None:
            assert self._failure is not None, "an answer ends with a Reply or a failure"
            raise self._failure
        return self.reply

    async def whole(self) -> Reply:
        """The whole answer, or its failure."""
        while self.running:
            await self.news()
        return self.result()

    async def events(self) -> AsyncGenerator[Event, None]:
        """All of them, from the first one on, whenever one starts to listen."""
        events = self._events if self.reply is None else _replay(self.reply)
        count = 0
        while True:
            while count < len(events):
                count += 1
                yield events[count - 1]
            if not self.running:
                self.result()
                return
            await self.news()

    async def _collect(self, events: AsyncGenerator[Event, None]) -> None:
        async with aclosing(events):
            async for event in events:
                self._events.append(event)
                if isinstance(event, Reply) and event.choices:
                    self.reply = event
                self._wake_listeners()

    def _wake_listeners(self) -> None:
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            if not news.done():  # else its listener has cancelled it
                news.set_result(None)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._wake_listeners()
        self._settle()

    def _settle(self) -> None:
        """A recorded answer that reached no client belongs to no conversation until a retry asks for it."""
        if self._listeners or self.running:
            return
        self._events, self._failure = [], None  # no one asks for a failure again, and its frames hold much
        for completion in self.reply.choices if self.reply is not None else ():
            completion.lost = self.lost


def _replay(reply: Reply) -> list[Event]:
    """The events of a recorded answer."""
    events: list[Event] = [Reply(reply.id, reply.created, reply.model, reply.prompt_tokens)]
    for number, completion in enumerate(reply.choices):
        if number:
            events.append(Choice(number))
        if reply.tokens:
            events.append(Tokens(reply.tokens[number]))
        events += _parts(completion.message, reply.beginning)
    return [*events, reply]


def _parts(message: Message, beginning: str) -> list[Event]:
    parts: list[Event] = []
    if reasoning := message.get("reasoning_content"):
        parts.append(Reasoning(reasoning))
    if content := message["content"].removeprefix(beginning):
        parts.append(Text(content))
    for number, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        parts.append(ToolCallEvent(number, call["id"], function["name"], arguments_text(function["arguments"])))
    return parts


class _State(IntEnum):
    """Of a call, in the order of how likely its client is to ask again."""

    ANSWERED = 0
    """Its client has the answer, or is receiving it."""
    RUNNING = 1
    """Its answer is being generated."""
    UNANSWERED = 2
    """It was refused or aborted, or failed, or its answer was lost."""


@dataclass(eq=False)
class _KnownCall:
    attempt: Attempt
    retry: int
    """The highest attempt that was given this answer."""
    answer: SharedAnswer | None
    """None = the call was refused before it began."""

    @property
    def delivered(self) -> bool:
        """Its client has the answer: that stays so."""
        return self.answer is not None and self.answer.was_delivered

    @property
    def state(self) -> _State:
        if self.answer is None or self.answer.unanswered or self.answer.lost:
            return _State.UNANSWERED
        return _State.RUNNING if self.answer.reply is None else _State.ANSWERED


class Retries:
    """The latest calls of one session."""

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._calls: dict[_KnownCall, None] = {}
        """The oldest first."""
        self._by_digest: dict[bytes, list[_KnownCall]] = {}
        """Those without a key."""
        self._undelivered: dict[bytes, list[_KnownCall]] = {}
        """The same without most of those whose client has its answer, and so will not ask again."""
        self._by_key: dict[str, _KnownCall] = {}

    def claim(self, attempt: Attempt, begin: Callable[[], SharedAnswer]) -> SharedAnswer:
        """The answer of the call that this attempt repeats, or a new one.

        Raises ApiError 409 for a key that was used with another body.
        """
        known = self._find(attempt)
        if known is None:
            answer = begin()
            self._remember(_KnownCall(attempt, attempt.retry, answer))
            return answer
        known.retry = max(known.retry, attempt.retry)
        if known.answer is None or known.answer.unanswered:
            known.answer = begin()
        return known.answer

    def note_refused(self, attempt: Attempt) -> None:
        """A first attempt was turned away and will be made again."""
        if attempt.retry == 0 and attempt.key is None:
            self._remember(_KnownCall(attempt, 0, None))

    def _find(self, attempt: Attempt) -> _KnownCall | None:
        if attempt.key is not None:
            return self._find_key(attempt, attempt.key)
        if attempt.retry == 0:
            return self._find_unanswered(attempt.digest)
        same = self._by_digest.get(attempt.digest, [])[::-1]
        fresh = [known for known in same if known.retry < attempt.retry]
        return max(fresh or same, key=lambda known: known.state, default=None)  # of equals, the newest

    def _find_unanswered(self, digest: bytes) -> _KnownCall | None:
        if digest not in self._undelivered:
            return None
        waiting = [known for known in self._undelivered[digest] if not known.delivered]
        self._undelivered[digest] = waiting
        return next((known for known in reversed(waiting) if known.state is _State.UNANSWERED), None)

    def _find_key(self, attempt: Attempt, key: str) -> _KnownCall | None:
        known = self._by_key.get(key)
        if known is not None and known.attempt.digest != attempt.digest:
            raise ApiError(
                409,
                f"Idempotency-Key {shown(key)} was used with another body; use a new key for a new request",
                code="idempotency_key_reused",
            )
        return known

    def _remember(self, call: _KnownCall) -> None:
        """Forgets the oldest calls beyond the limit, but none that is running."""
        self._calls[call] = None
        if call.attempt.key is not None:
            self._by_key[call.attempt.key] = call
        else:
            self._by_digest.setdefault(call.attempt.digest, []).append(call)
            self._undelivered.setdefault(call.attempt.digest, []).append(call)
        excess = len(self._calls) - self._remembered
        if excess > 0:
            ended = (known for known in self._calls if known.state is not _State.RUNNING)
            for known in list(islice(ended, excess)):
                self._forget(known)

    def _forget(self, call: _KnownCall) -> None:
        del self._calls[call]
        digest, key = call.attempt.digest, call.attempt.key
        if key is not None:
            del self._by_key[key]
            return
        for known in (self._by_digest, self._undelivered):
            known[digest] = [other for other in known[digest] if other is not call]
            if not known[digest]:
                del known[digest]
