"""Reading a request: the keys it brings, and its body as JSON, within limits of size, time and depth."""

import asyncio
from typing import Any

import orjson
from starlette.requests import Request

from areal.config.rollout import ProxyLimits
from areal.proxy.errors import ApiError, bad_request

MAX_DEPTH = 100
"""Levels of nesting that a body may have."""


def keys_of(request: Request) -> list[str]:
    """Every one, in whichever header an SDK sends it. A header that comes twice brings two."""
    bearers = [value.partition(" ") for value in request.headers.getlist("authorization")]
    keys = [key.strip() for scheme, _, key in bearers if scheme.lower() == "bearer"]
    return [key for key in (*keys, *request.headers.getlist("x-api-key")) if key]


async def read_body(request: Request, limits: ProxyLimits) -> bytes:
    """Raises ApiError 413 or 408."""
    limit = limits.max_body_bytes
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_seconds):
            async for chunk in request.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    raise ApiError(413, f"a body may have {limit} bytes (proxy.limits.max_body_bytes)")
    except TimeoutError:
        raise ApiError(408, f"the body must arrive within {limits.body_timeout_seconds:g} s") from None
    return b"".join(chunks)


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
