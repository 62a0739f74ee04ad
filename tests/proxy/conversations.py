"""What tests of several dialects ask and get."""

from typing import Any

import httpx
from openai import AsyncOpenAI

from areal.proxy import Proxy, Session

QUESTION = {"role": "user", "content": "Sort 5291"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": 2}'

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [QUESTION]},
    "responses": {"input": [QUESTION]},
    "messages": {"messages": [QUESTION], "max_tokens": 16},
}
"""A plain question, by route."""

ANSWERS = {
    "plain": "1259",
    "several characters of several bytes": "zwölf 你好 🙂!",
    "white space around": "\n  1259 \n",
    "one call": CALL,
    "text and a call": f"I will add.\n{CALL}",
    "two calls": f"{CALL}\n{CALL}",
    "text after a call": f"{CALL}\nthere",
    "malformed call": '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>',
    "half a mark": "a < b, <tool_ca",
    "nothing": "",
}
"""What the engine says, by what is hard about it."""


async def ask(client: AsyncOpenAI, messages: Any = (QUESTION,), **parameters: Any) -> Any:
    """A call of the SDK to chat/completions."""
    return await client.chat.completions.create(model="any-name", messages=list(messages), **parameters)


async def post(
    proxy: Proxy,
    session: Session,
    headers: dict[str, str] | None = None,
    *,
    route: str = "chat/completions",
    **body: Any,
) -> httpx.Response:
    """The plain question without an SDK, changed by what is in `body`."""
    url = f"{session.base_url}/{route}"
    return await proxy.http_client.post(url, json=BODIES.get(route, {}) | body, headers=headers or {})
