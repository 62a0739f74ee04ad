"""Several engines as one, of which any may end at any moment: requests are routed, and moved when their engine ends.

Routing: a session stays with its engine, which has the conversation cached; a new one goes where its prompt is, so that
the samples of a group share their prompt's computation; everything else goes to the engine with the least to do. A
session moves between two of its calls when its engine has `SPILL` requests more than the least loaded one.

When an engine ends, the requests that it had go to another with the tokens that it had drawn (`ModelRequest.drawn`).
Their callers notice nothing: a stream goes on without gap or repeat. An engine may refuse to go on from drawn tokens,
because its grammar does not take them; then the answer begins again, unless its reader has seen some of it. While there
is no engine, requests wait for one.

Invariants: only members are asked; an answer comes from its caller's request and the tokens of members, each once.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from areal.api.engine_api import EngineHealth, InferenceEngine, WeightUpdate
from areal.api.errors import DrawnRefused, EngineError, EngineGone, WrongWeights
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.api.messages import EngineAddress
from areal.engine.inference.remote import GENERATE_ROLE, RemoteEngine
from areal.infra.rpc.channel import ChannelClosed
from areal.infra.rpc.connect import connect
from areal.infra.rpc.frames import role_secret
from areal.infra.rpc.wire import api_wire
from areal.utils import waits
from areal.utils.bounded_cache import BoundedCache
from areal.utils.logging import getLogger

SPILL = 8
"""So many requests more than the least loaded engine are worth computing a conversation's beginning again."""
MAX_HOMES = 1 << 16
"""Sessions and prompts whose engine is remembered."""
MAX_FRUITLESS_ENDS = 3
"""Engines that may end in a row while they have a request and before they draw a token for it: then it is to blame."""
CONNECT_SECONDS = 30.0
"""An engine may be busy with a step when it is connected to."""
logger = getLogger("engines")


@dataclass(eq=False)
class _Member:
    name: str
    engine: InferenceEngine
    in_flight: int = 0
    served: int = 0


class EngineGroup:
    """Implements `InferenceEngine` over its members. They are its own: it closes them."""

    def __init__(self, on_lost: Callable[[str, BaseException], None] = lambda name, error: None) -> None:
        """`on_lost` is told of members that left because they failed."""
        self.outages = 0
        """How often the last member has left."""
        self.moved = 0
        """Requests that went to another engine because theirs ended."""
        self.tokens_again = 0
        """Tokens, of prompts and answers, that another engine had to compute again for them."""
        self._on_lost = on_lost
        self._members: dict[str, _Member] = {}
        self._homes: BoundedCache[Hashable, str] = BoundedCache(MAX_HOMES)
        """By session or prompt: the member that has computed it."""
        self._changed = asyncio.Event()
        """Set when a member joins, and at the end."""
        self._ended: str | None = None
        """Why no engine will join any more."""

    @property
    def members(self) -> list[str]:
        return list(self._members)

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests that each member has now."""
        return {name: member.in_flight for name, member in self._members.items()}

    def add(self, name: str, engine: InferenceEngine) -> None:
        """Route requests to this engine too. A name belongs to one engine, not to the one that replaces it."""
        self._members[name] = _Member(name, engine)
        self._changed.set()

    def remove(self, name: str) -> InferenceEngine | None:
        """Send this engine nothing more; what it has is finished there if it goes on. It is the caller's to close."""
        member = self._members.pop(name, None)
        if member is None:
            return None
        self.outages += not self._members
        return member.engine

    def give_up(self, why: str) -> None:
        """No engine will join any more: whoever waits for one gets an EngineGone."""
        self._ended = self._ended or why
        self._changed.set()

    async def until_serving(self) -> None:
        """Wait until there is a member. Raises EngineGone if there will be none."""
        while not self._members:
            if self._ended is not None:
                raise EngineGone(self._ended)
            self._changed.clear()
            with waits.current().entered("waits until an engine serves"):
                await self._changed.wait()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        answer: _Answer | None = None  # from the first engine that fails on: nearly no call needs one
        while True:
            member = await self._choose(req)
            try:
                return await member.engine.agenerate(req if answer is None else answer.request)
            except EngineGone as gone:
                answer = answer or _Answer(req)
                answer.drawn.extend(gone.drawn)
                self._move(answer, member, gone)
            except DrawnRefused as refused:
                answer = answer or _Answer(req)
                answer.begin_again(refused)
            finally:
                member.in_flight -= 1

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        answer = _Answer(req)
        while True:
            member = await self._choose(req)
            try:
                async with aclosing(member.engine.astream(answer.request, every_seconds=every_seconds)) as chunks:
                    async for chunk in chunks:
                        answer.drawn.extend(chunk)
                        answer.seen = True
                        yield chunk
                return
            except EngineGone as gone:
                self._move(answer, member, gone)
            except DrawnRefused as refused:
                answer.begin_again(refused)
            finally:
                member.in_flight -= 1

    async def stage_weights(self, update: WeightUpdate) -> None:
        await self.each("stage_weights", update)

    async def update_weights(self, update: WeightUpdate) -> None:
        await self.each("update_weights", update)

    async def pause(self) -> None:
        await self.each("pause")

    async def resume(self) -> None:
        await self.each("resume")

    async def health(self) -> EngineHealth:
        """Of all together; the version and the digest are those of the member that is furthest behind."""
        healths: list[EngineHealth] = await self.each("health")
        oldest = min(healths, key=lambda each: each.version)
        return replace(
            oldest,
            running=sum(each.running for each in healths),
            waiting=sum(each.waiting for each in healths),
            paused=any(each.paused for each in healths),
        )

    async def each(self, verb: str, *args: Any) -> list[Any]:
        """What every member answers to an asynchronous verb. One that fails where another does not leaves the group.

        If all have ended, the first that joins is asked. Raises what a member raised if none has answered, and
        WrongWeights if one has, with its name.
        """
        while True:
            await self.until_serving()
            members = list(self._members.values())
            calls = (getattr(member.engine, verb)(*args) for member in members)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            answers = [each for each in outcomes if not isinstance(each, BaseException)]
            for member, outcome in zip(members, outcomes, strict=True):
                if isinstance(outcome, WrongWeights):  # what went wrong there may have gone unnoticed elsewhere
                    raise WrongWeights(f"{member.name}: {outcome}")
                if isinstance(outcome, EngineGone | TimeoutError) or (answers and isinstance(outcome, Exception)):
                    self._lose(member, outcome)
                elif isinstance(outcome, BaseException):
                    raise outcome
            if answers:
                return answers

    async def aclose(self) -> None:
        self.give_up("the engine was closed")
        members, self._members = self._members, {}
        await asyncio.gather(*(member.engine.aclose() for member in members.values()))

    async def _choose(self, req: ModelRequest) -> _Member:
        """Where the request goes; it counts there as in flight from here on."""
        waits.current().asked_model = True  # also of an episode that does not come by its own session or engine
        await self.until_serving()
        members = self._members
        least = min(members.values(), key=lambda member: (member.in_flight, member.served))
        chosen = least
        if len(members) > 1:
            keys: list[Hashable] = [req.session] if req.session else []
            home = self._homes.get(req.session) if req.session else None
            if home is None:
                prompt = hash(tuple(req.input_ids))
                keys.append(prompt)
                home = self._homes.get(prompt)
            if home in members and members[home].in_flight < least.in_flight + SPILL:
                chosen = members[home]
            for key in keys:
                self._homes.put(key, chosen.name)
        chosen.in_flight += 1
        chosen.served += 1
        return chosen

    def _move(self, answer: "_Answer", member: _Member, gone: EngineGone) -> None:
        """The member has ended: the request goes to another."""
        self._lose(member, gone)
        answer.end_of_engine(gone)
        self.moved += 1
        self.tokens_again += len(answer.asked.input_ids) + len(answer.drawn.tokens)

    def _lose(self, member: _Member, error: BaseException) -> None:
        if self._members.get(member.name) is member:
            self.remove(member.name)
            logger.debug("%s leaves the group: %s", member.name, error)
            self._on_lost(member.name, error)


class _Answer:
    """What is known of one answer."""

    def __init__(self, asked: ModelRequest) -> None:
        self.asked = asked
        self.drawn = _copy(asked.drawn)
        self.request = asked
        """What the next engine is asked."""
        self.seen = False
        """Whether its reader has got a part of it."""
        self._fruitless = 0
        self._known = len(self.drawn.tokens)
        """Tokens that were drawn before the present engine."""

    def end_of_engine(self, gone: EngineGone) -> None:
        """Raises EngineError if it is this request that engines end at."""
        self._fruitless = self._fruitless + 1 if len(self.drawn.tokens) == self._known else 0
        if self._fruitless >= MAX_FRUITLESS_ENDS:
            raise EngineError(f"{self._fruitless} engines ended before they drew a token of this answer: {gone}")
        self._known = len(self.drawn.tokens)
        self.request = replace(self.asked, drawn=_copy(self.drawn))

    def begin_again(self, refused: DrawnRefused) -> None:
        """Raises `refused` if the drawn tokens are the caller's own, or if some of them have been read."""
        if self.request is self.asked or self.seen:
            raise refused
        self.drawn, self.request = _copy(self.asked.drawn), self.asked
        self._known = len(self.drawn.tokens)


def _copy(drawn: TokenChunk | None) -> TokenChunk:
    copy = TokenChunk()
    if drawn is not None:
        copy.extend(drawn)
    return copy


class EngineConnections:
    """Keeps a group connected to the engines that the driver names, of which the latest list counts.

    A connection that ends, or cannot be made, while its engine is named is reported and not made again: the engine may
    have been replaced by one with other weights, and it is for the driver to say when it serves.
    """

    def __init__(
        self, group: EngineGroup, run_secret: bytes, on_lost: Callable[[EngineAddress], None] = lambda address: None
    ) -> None:
        """What `run_secret` gives workers opens engines that have no secret of their own."""
        self._group = group
        self._secret = role_secret(run_secret, GENERATE_ROLE)
        self._on_lost = on_lost
        self._named: dict[EngineAddress, RemoteEngine | None] = {}
        """None = it is being connected to, or lost."""

    async def follow(self, engines: Sequence[EngineAddress]) -> None:
        """Connect to those that are new, and leave those that are not named any more."""
        before, self._named = self._named, {each: self._named.get(each) for each in engines}
        for address, engine in before.items():
            if address not in self._named and engine is not None:
                self._group.remove(_key(address))
                await engine.aclose()  # its answers go on elsewhere
        await asyncio.gather(*(self._join(each) for each in engines if each not in before))

    async def _join(self, address: EngineAddress) -> None:
        secret = self._secret if address.secret is None else address.secret
        try:
            channel = await connect(
                address.address, wire=api_wire(), peer=address.name, secret=secret, timeout_seconds=CONNECT_SECONDS
            )
        except ChannelClosed as error:
            logger.warning("%s is left out: %s", address.name, error)
            self._lose(address)
            return
        if address not in self._named:
            await channel.close()
            return
        engine = self._named[address] = RemoteEngine(channel)
        self._group.add(_key(address), engine)
        channel.closed.add_done_callback(lambda _: self._lose(address))

    def _lose(self, address: EngineAddress) -> None:
        self._group.remove(_key(address))
        if address in self._named:
            self._named[address] = None
            self._on_lost(address)


def _key(address: EngineAddress) -> str:
    return f"{address.name} #{address.start}"
