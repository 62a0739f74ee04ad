"""Reading a request: what its headers say, and its body as JSON, within limits of size, time and depth.

A client sends its whole conversation with every call. `KnownBodies` remembers how the latest bodies began, byte for
byte, so that of the next one only what is new is parsed, read and digested.
"""

import asyncio
import secrets
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from areal.config.rollout import ProxyLimits
from areal.proxy.errors import ApiError, bad_request
from areal.trajectory.matching import MAX_CACHED
from areal.trajectory.message import Message

if TYPE_CHECKING:
    from _hashlib import HASH

MAX_DEPTH = 100
"""Levels of nesting that a body may have."""
WORTH_KNOWING = 2048
"""Bytes of a body; a shorter one is parsed in less time than it takes to remember it."""
MAX_KNOWN = 1 << 21
"""Bytes of the longest body that is kept for the next: a session keeps a few."""


class Head(NamedTuple):
    """What the proxy reads of a request's headers."""

    keys: list[str]
    """Every one, in whichever header an SDK sends it. A header that comes twice brings two."""
    retry_count: str
    idempotency_key: str


def read_head(headers: Iterable[tuple[bytes, bytes]]) -> Head:
    """`headers` as ASGI has them, names in lower case. What is not there is empty."""
    found: dict[bytes, list[str]] = {name: [] for name in _READ}
    for name, value in headers:
        if name in found:
            found[name].append(value.decode("latin-1"))
    bearers, api_keys, counts, names = found.values()
    split = [value.partition(" ") for value in bearers]
    keys = [key.strip() for scheme, _, key in split if scheme.lower() == "bearer"]
    return Head([key for key in (*keys, *api_keys) if key], next(iter(counts), ""), next(iter(names), ""))


_READ = (b"authorization", b"x-api-key", b"x-stainless-retry-count", b"idempotency-key")


async def read_body(receive: Receive, limits: ProxyLimits) -> bytes:
    """Raises ApiError 413 or 408, and ClientDisconnect."""
    chunks: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(limits.body_timeout_seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                more = message.get("more_body", False)
                chunks.append(chunk)
                size += len(chunk)
                require_size(size, limits)
    except TimeoutError:
        raise ApiError(408, f"the body must arrive within {limits.body_timeout_seconds:g} s") from None
    return b"".join(chunks)


def require_size(size: int, limits: ProxyLimits) -> None:
    """Raises ApiError 413."""
    if size > limits.max_body_bytes:
        raise ApiError(413, f"a body may have {limits.max_body_bytes} bytes (proxy.limits.max_body_bytes)")


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises ApiError 400."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, got {type(body).__name__}")
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
        _require_shallow(body)
    return body


def _require_shallow(body: dict[str, Any]) -> None:
    """Level by level, because everything that walks the body later recurses."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise bad_request(f"the body's JSON may be nested {MAX_DEPTH} levels deep")


class _KnownBody(NamedTuple):
    beginning: bytes
    """Of the body, up to the end of its last message."""
    first: int
    """Where its first message begins."""
    messages: list[Message]
    """What was read from them."""
    hashed: "HASH"
    """Of the beginning; it is copied, never continued."""


class KnownBodies:
    """How the latest bodies of a session began. Threads may share it.

    A body that begins with the very bytes of a known one, and goes on with a comma, is parsed with a number in the
    place of the messages that are known. The number is secret: if it comes out as the first item of the list, the known
    messages are what this body has there, wherever else in it a client may have spelled them.
    """

    def __init__(self) -> None:
        self._latest: tuple[_KnownBody, ...] = ()

    def parse(self, raw: bytes, name: str) -> tuple[dict[str, Any], list[Message]]:
        """The body, in whose list `name` are only the items after those that are known, and what these were read as.

        Raises ApiError 400.
        """
        for known in self._latest:
            end = len(known.beginning)
            if raw.startswith(known.beginning) and raw.startswith(b",", end):
                body = _parsed_without(raw, known.first, end, name)
                if body is not None:
                    return body, known.messages
        return parse_object(raw), []

    def digest(self, raw: bytes) -> bytes:
        """Of the whole body."""
        known = next((known for known in self._latest if raw.startswith(known.beginning)), None)
        return _hash(raw, known).digest()

    def remember(self, raw: bytes, items: list[Any], past: list[Message], messages: list[Message]) -> None:
        """A body had `items` after `past`, and all were read as `messages`. Only compact JSON is recognised later."""
        if not WORTH_KNOWING <= len(raw) <= MAX_KNOWN:
            return
        known = next((known for known in self._latest if known.messages is past), None)
        try:
            written = orjson.dumps(items)[1:-1]
        except TypeError:  # numbers beyond 64 bits
            return
        at = raw.find(written) if known is None else len(known.beginning) + 1
        end = at + len(written)
        if at < 1 or raw[at : end + 1] != written + b"]":
            return
        beginning = raw[:end]
        body = _KnownBody(beginning, at if known is None else known.first, messages, _hash(beginning, known))
        self._latest = (body, *(each for each in self._latest if not raw.startswith(each.beginning)))[:MAX_CACHED]


def _hash(raw: bytes, known: _KnownBody | None) -> "HASH":
    """Of these bytes, which begin with the known ones."""
    if known is None:
        return sha256(raw)  # processors have instructions for it
    hashed = known.hashed.copy()
    hashed.update(raw[len(known.beginning) :])
    return hashed


_STAND_IN = 10**17 + secrets.randbelow(9 * 10**17)


def _parsed_without(raw: bytes, begin: int, end: int, name: str) -> dict[str, Any] | None:
    """The body without what is between, if that is how its list `name` begins."""
    try:
        body = parse_object(b"%b%d%b" % (raw[:begin], _STAND_IN, raw[end:]))
    except ApiError:
        return None  # what is wrong with it is said of the whole body
    items = body.get(name)
    if not isinstance(items, list) or items[:1] != [_STAND_IN]:
        return None
    del items[0]
    return body
