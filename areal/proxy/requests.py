"""Reading a request: what its headers say, and its body as JSON, within limits of size, time and depth."""

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from areal.config.rollout import ProxyLimits
from areal.proxy.errors import ApiError, bad_request

MAX_DEPTH = 100
"""Levels of nesting that a body may have."""


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
