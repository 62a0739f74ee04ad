"""One answer on its way, for everybody who asks for it: the client that asked first, and its retries.

It runs in a task of its own, so that it outlives any one of them, and is aborted when the last has gone. Once landed it
is remembered as what was recorded, and told again from there.
"""

# MERGED-DOC
# Which calls of a session are one and the same.
#
# A retry gets the answer of the call it repeats, and no second one is sampled. It is marked by an SDK's retry header
# (with the same body) or by an `Idempotency-Key`; unmarked, the same body is a retry only where the answer was recorded
# but its client was gone before it had it. The same body sent twice on purpose is two samples.
#
# A client that went away earlier left nothing behind: its generation was aborted. Such a call, and one that failed, stays
# on the list as owed, so that its retry is not taken for one of another call that happened to have the same body.

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

from areal.proxy.errors import ApiError
from areal.proxy.types import CallMade, Event, Reply
from areal.trajectory.completion import Completion
from areal.trajectory.message import arguments_text
from areal.trajectory.parsers.base import Reasoning, Text

ABORT_SECONDS = 5.0


class SharedAnswer:
    """Listened to inside `async with`; whoever sent the whole answer out says so with `delivered`."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        """The last event is the Reply with its choices."""
        self.reply: Reply | None = None
        """Set when it has landed."""
        self._events: list[Event] = []
        self._grown = asyncio.Event()
        self._listeners = 0
        self._arrived = False
        self._aborted = False
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = asyncio.ensure_future(self._fly(events))
        self._task.add_done_callback(self._end)

    @property
    def owed(self) -> bool:
        """It failed or was aborted: nothing was recorded, and its client may ask again."""
        return self.reply is None and (self._aborted or self._task is None)

    @property
    def lost(self) -> bool:
        """It was recorded, but nobody has it and nobody waits for it."""
        return self.reply is not None and not self._arrived and not self._listeners

    def delivered(self) -> None:
        self._arrived = True

    async def __aenter__(self) -> Self:
        self._listeners += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._listeners -= 1
        task = self._task
        if self._listeners == 0 and self.reply is None and task is not None:
            self._aborted = task.cancel()
            await asyncio.wait((task,), timeout=ABORT_SECONDS)
        self._account()

    async def arrival(self) -> Reply:
        """The whole answer, or its failure."""
        while self._flying:
            await self._grown.wait()
        return self._result()

    async def events(self) -> AsyncGenerator[Event, None]:
        """From the first one on, whenever it is asked."""
        told = self._events if self.reply is None else replay(self.reply)
        count = 0
        while True:
            while count < len(told):
                count += 1
                yield told[count - 1]
            if not self._flying:
                self._result()
                return
            await self._grown.wait()

    async def _fly(self, events: AsyncGenerator[Event, None]) -> None:
        async with aclosing(events):
            async for event in events:
                self._events.append(event)
                if isinstance(event, Reply) and event.choices:
                    self.reply = event
                self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._wake()
        self._account()

    @property
    def _flying(self) -> bool:
        return self.reply is None and self._task is not None

    def _result(self) -> Reply:
        if self.reply is None:
            assert self._failure is not None, "a flight ends with a Reply or a failure"
            raise self._failure
        return self.reply

    def _account(self) -> None:
        """A recorded answer that reached nobody belongs to no conversation until somebody asks for it again."""
        if self._listeners or self._flying:
            return
        self._events, self._failure = [], None  # nobody comes back to a failure, and its frames hold much
        for completion in self.reply.choices if self.reply is not None else ():
            completion.lost = self.lost


def replay(reply: Reply) -> list[Event]:
    """A recorded answer as a stream tells it."""
    begin = Reply(reply.id, reply.created, reply.model, reply.prompt_tokens)
    return [begin, *_said(reply.choices[0]), reply]


def _said(completion: Completion) -> list[Event]:
    message = completion.message
    said: list[Event] = []
    if reasoning := message.get("reasoning_content"):
        said.append(Reasoning(reasoning))
    if message["content"]:
        said.append(Text(message["content"]))
    return [*said, *(_made(number, call) for number, call in enumerate(message.get("tool_calls", ())))]


def _made(number: int, call: dict[str, Any]) -> CallMade:
    function = call["function"]
    return CallMade(number, call["id"], function["name"], arguments_text(function["arguments"]))


RETRY_HEADER = "x-stainless-retry-count"
KEY_HEADER = "idempotency-key"


@dataclass(frozen=True)
class Mark:
    """By what a call is known again."""

    digest: bytes
    """Of its body."""
    retry: int
    """0 = the first attempt, or one that does not say."""
    key: str | None


def mark_of(route: str, body: bytes, headers: Mapping[str, str]) -> Mark:
    count = headers.get(RETRY_HEADER, "")
    retry = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0
    digest = blake2b(body, digest_size=16, person=route.encode()[:16]).digest()
    return Mark(digest, retry, headers.get(KEY_HEADER) or None)


@dataclass(eq=False)
class _Known:
    mark: Mark
    retry: int
    """The highest attempt that was given this answer."""
    flight: SharedAnswer | None
    """None = it was refused before it began."""

    @property
    def owed(self) -> bool:
        return self.flight is None or self.flight.owed

    @property
    def forgettable(self) -> bool:
        return self.owed or (self.flight is not None and self.flight.reply is not None)

    @property
    def rank(self) -> int:
        """Whose client is the likelier to ask again."""
        assert self.flight is not None or self.owed
        if self.flight is None or self.owed or self.flight.lost:
            return 2
        return 0 if self.flight.reply is not None else 1


class Retries:
    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._known: list[_Known] = []

    def claim(self, mark: Mark, launch: Callable[[], SharedAnswer]) -> SharedAnswer:
        """The flight that a call joins, or a new one. Raises ApiError 409 where a key comes with another body."""
        known = self._find(mark)
        if known is None:
            self._known.append(_Known(mark, mark.retry, flight := launch()))
            self._forget()
            return flight
        known.retry = max(known.retry, mark.retry)
        if known.owed or known.flight is None:
            known.flight = launch()
        return known.flight

    def refuse(self, mark: Mark) -> None:
        """A first attempt was turned away and will be made again."""
        if mark.retry == 0 and mark.key is None:
            self._known.append(_Known(mark, 0, None))
            self._forget()

    def _find(self, mark: Mark) -> _Known | None:
        if mark.key is not None:
            return self._keyed(mark)
        same = [known for known in reversed(self._known) if known.mark.digest == mark.digest and not known.mark.key]
        if mark.retry == 0:
            return next((known for known in same if known.rank == 2), None)
        fresh = [known for known in same if known.retry < mark.retry]
        return max(fresh or same, key=lambda known: known.rank, default=None)  # of equals, the newest

    def _keyed(self, mark: Mark) -> _Known | None:
        known = next((known for known in self._known if known.mark.key == mark.key), None)
        if known is not None and known.mark.digest != mark.digest:
            raise ApiError(
                409,
                f"Idempotency-Key {mark.key!r:.100} was used with another body; use a new key for a new request",
                code="idempotency_key_reused",
            )
        return known

    def _forget(self) -> None:
        """The oldest, but none that is on its way."""
        excess = len(self._known) - self._remembered
        if excess > 0:
            old = [known for known in self._known if known.forgettable][:excess]
            self._known = [known for known in self._known if known not in old]
