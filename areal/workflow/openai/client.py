"""The official client on what an episode is given; without it, on what the environment says."""

import os
from typing import Any

from openai import AsyncOpenAI


def openai_client(extra_kwargs: dict[str, Any]) -> AsyncOpenAI:
    """On the shared HTTP client a new AsyncOpenAI costs next to nothing; without it, its own takes some 30 ms."""
    return AsyncOpenAI(
        base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
        api_key=extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY"),
        http_client=extra_kwargs.get("http_client"),
        max_retries=0,
    )
