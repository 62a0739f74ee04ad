"""The task that episodes get, and one call of the real SDK."""

from typing import Any

import openai.resources.chat.completions  # noqa: F401  (the SDK loads it with the first call, which a deadline may hit)
from openai import AsyncOpenAI

MAX_POSITIONS = 1024
DATA: dict[str, Any] = {"messages": [{"role": "user", "content": "Sort 5291"}], "answer": "1259"}


async def chat(context: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """One call of the SDK, with what was injected into an agent (a dict) or what it finds in its context."""
    keys = ("base_url", "api_key", "http_client")
    found = context if isinstance(context, dict) else {key: getattr(context, key) for key in keys}
    async with AsyncOpenAI(max_retries=0, **{key: found[key] for key in keys if key in found}) as client:
        return await client.chat.completions.create(model="any", messages=messages, **options)
