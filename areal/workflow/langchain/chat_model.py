"""LangChain's chat model on what an episode is given; without it, on what the environment says."""

import os
from typing import Any

from areal.workflow.extras import load
from areal.workflow.math_task import MODEL


def chat_model(extra_kwargs: dict[str, Any]) -> Any:
    """A `ChatOpenAI` for asynchronous use."""
    key = extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY")

    # A key that must be awaited tells ChatOpenAI that nobody will call it synchronously. It would make a synchronous
    # client too otherwise, and load its certificates, for every episode: base URLs differ.
    async def api_key() -> str:
        return key or ""

    return load("langchain_openai", "langchain-openai", extra="langchain").ChatOpenAI(
        model=MODEL,
        base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
        api_key=api_key,
        http_async_client=extra_kwargs.get("http_client"),
        max_retries=0,
    )
