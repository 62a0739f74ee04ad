"""One answer on its way, for everybody who asks for it: the client that asked first, and its retries.

It runs in a task of its own, so that it outlives any one of them, and is aborted when the last has gone. Once landed it
is remembered as what was recorded, and told again from there.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Self

from areal.proxy.exchange import CallMade, Event, Reply
from areal.trajectory.completion import Completion
from areal.trajectory.meaning import arguments_text
from areal.trajectory.parsers.events import Reasoning, Text

ABORT_SECONDS = 5.0


class Flight:
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
