"""A long call costs its own client, not the others: what cannot fit is refused unread, the rest is read in a thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from conversations import ADD, QUESTION, post

from areal.proxy import Proxy, ProxyLimits, Session
from areal.trajectory import Renderer
from areal.trajectory.rendering import LONG_TEXT

WAIT_SECONDS = 20
POSITIONS = 512
"""Of the fixtures' model."""
StartProxy = Callable[..., Awaitable[Proxy]]
CALLS = [
    {"id": f"call_{number}", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    for number in range(POSITIONS)
]
HOPELESS: dict[str, dict[str, Any]] = {
    "a long text": {"messages": [{"role": "user", "content": "12345" * 200_000}]},
    "a long text by the system": {"messages": [{"role": "system", "content": "12345" * 200_000}, QUESTION]},
    "many messages": {"messages": [QUESTION] * 20_000},
    "many tools": {"messages": [QUESTION], "tools": [ADD] * 2000},
    "many calls": {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": CALLS * 2}, QUESTION]},
    "much thinking and many short texts": {
        "messages": [{"role": role, "content": "5291" * 500} for role in ("user", "assistant")] * 50 + [QUESTION]
    },
}


class WatchedTokenizer:
    """A tokenizer without a core that says how much it was given, and holds long texts while `held` is set."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.longest = 0
        self.released = threading.Event()
        self.released.set()
        self.working = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name in ("backend_tokenizer", "_inner"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.longest = max(self.longest, len(text))
        if len(text) > LONG_TEXT:
            self.working.set()
            assert self.released.wait(WAIT_SECONDS)
        return list(self._inner.encode(text, **options))


@pytest.fixture
async def watched(engine: Any) -> AsyncIterator[WatchedTokenizer]:
    engine.tokenizer = WatchedTokenizer(engine.tokenizer)
    yield engine.tokenizer
    engine.tokenizer.released.set()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, WAIT_SECONDS)


@pytest.mark.parametrize("name", HOPELESS)
async def test_call_that_cannot_fit_is_refused_before_it_is_tokenised(
    proxy: Proxy, session: Session, name: str
) -> None:
    core, longest = proxy._renderer._core, []

    class Core:
        """Remembers how much it was asked to encode."""

        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

        def encode(self, text: str, **options: Any) -> Any:
            longest.append(len(text))
            return core.encode(text, **options)

    proxy._renderer._core = Core()
    answer = await post(proxy, session, **HOPELESS[name])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert f"the model has {POSITIONS} positions" in answer.json()["error"]["message"]
    assert max(longest, default=0) <= LONG_TEXT
    assert (await post(proxy, session)).status_code == 200


async def test_of_text_that_a_tokenizer_may_or_may_not_shrink_little_is_tokenised(
    start_proxy: StartProxy, watched: WatchedTokenizer
) -> None:
    """Nothing is known of the tokens of this one, so it is asked; but not for millions of them."""
    proxy = await start_proxy()
    session = proxy.open_session()
    answer = await post(proxy, session, messages=[{"role": "user", "content": "12345" * 400_000}])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert 0 < watched.longest < 100_000


async def test_long_text_that_fits_is_the_same_tokens(start_proxy: StartProxy, engine: Any) -> None:
    engine._max_positions = 1 << 20
    proxy = await start_proxy(max_positions=1 << 20)
    session = proxy.open_session()
    messages = [{"role": "user", "content": "hello there 5291 " * 20_000}]
    assert (await post(proxy, session, messages=messages)).status_code == 200
    said = session.tree.completions[0]
    renderer = Renderer(engine.tokenizer)
    assert said.prompt_ids.tolist() == renderer.encode(renderer.render(messages, None))
    follow = [*messages, {"role": "assistant", "content": "1259"}, QUESTION]
    assert session.tree.unread(follow) == follow[1:], "what was read in a thread is remembered"
    assert (await post(proxy, session, messages=follow)).status_code == 200
    assert session.tree.completions[1].parent == 0
    assert session.tree.completions[1].extends


async def test_other_calls_are_answered_while_a_long_text_is_tokenised(
    start_proxy: StartProxy, engine: Any, watched: WatchedTokenizer
) -> None:
    engine._max_positions = 1 << 20
    proxy = await start_proxy(max_positions=1 << 20)
    slow, other = proxy.open_session(), proxy.open_session()
    watched.released.clear()
    long_call = asyncio.ensure_future(post(proxy, slow, messages=[{"role": "user", "content": "hello 5291 " * 20_000}]))
    await until(watched.working)
    for session in (other, slow):
        assert (await post(proxy, session)).status_code == 200
        assert not long_call.done()
    watched.released.set()
    assert (await long_call).status_code == 200
    first, last = slow.tree.completions
    assert [first.parent, last.parent] == [None, None]
    assert len(first.prompt_ids) < len(last.prompt_ids)
    follow = [QUESTION, {"role": "assistant", "content": "1259"}, QUESTION]
    assert (await post(proxy, slow, messages=follow)).status_code == 200
    assert slow.tree.completions[2].parent == first.index


async def test_long_call_whose_client_goes_away_leaves_no_trace(
    start_proxy: StartProxy, engine: Any, watched: WatchedTokenizer
) -> None:
    engine._max_positions = 1 << 20
    proxy = await start_proxy(max_positions=1 << 20)
    session = proxy.open_session()
    watched.released.clear()
    long_call = asyncio.ensure_future(
        post(proxy, session, messages=[{"role": "user", "content": "hello 5291 " * 20_000}])
    )
    await until(watched.working)
    long_call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long_call
    assert (await post(proxy, session)).status_code == 200
    watched.released.set()
    assert (await post(proxy, session, messages=[QUESTION, QUESTION])).status_code == 200
    assert [node.parent for node in session.tree.completions] == [None, None]
    assert engine.in_flight == 0


async def test_ending_a_session_does_not_wait_for_its_long_text(
    start_proxy: StartProxy, engine: Any, watched: WatchedTokenizer
) -> None:
    engine._max_positions = 1 << 20
    proxy = await start_proxy(max_positions=1 << 20)
    session = proxy.open_session()
    watched.released.clear()
    long_call = asyncio.ensure_future(
        post(proxy, session, messages=[{"role": "user", "content": "hello 5291 " * 20_000}])
    )
    await until(watched.working)
    await proxy.end_session(session)
    assert (await long_call).status_code == 410
    assert not watched.released.is_set()


async def test_long_text_waits_no_longer_than_a_call_may_take(
    start_proxy: StartProxy, engine: Any, watched: WatchedTokenizer
) -> None:
    proxy = await start_proxy(ProxyLimits(call_timeout_seconds=0.05), max_positions=1 << 20)
    session = proxy.open_session()
    watched.released.clear()
    answer = await post(proxy, session, messages=[{"role": "user", "content": "hello 5291 " * 20_000}])
    assert answer.status_code == 503
    assert "was not read within 0.05 s" in answer.json()["error"]["message"]


def big_schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property_{number}": {"type": "integer"} for number in range(count)}}


@pytest.mark.parametrize(
    ("demand", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "SCHEMA"}}},
            "response_format",
        ),
        ({"tools": "TOOLS", "tool_choice": "required"}, "tools"),
        ({"tools": "STRICT"}, "tools"),
    ],
    ids=["response_format", "tool_choice", "strict"],
)
async def test_schema_that_is_too_big_to_follow_is_refused_by_name(
    start_proxy: StartProxy, engine: Any, demand: dict[str, Any], param: str
) -> None:
    engine._max_positions = 1 << 22
    proxy = await start_proxy(max_positions=1 << 22)
    session = proxy.open_session()
    function = {"name": "add", "parameters": big_schema(10_000)}
    put = {
        "SCHEMA": function["parameters"],
        "TOOLS": [{"type": "function", "function": function}],
        "STRICT": [{"type": "function", "function": {**function, "strict": True}}],
    }

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(part) for key, part in value.items()}
        return put.get(value, value)

    answer = await post(proxy, session, **filled(demand))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "may have 131072 bytes" in answer.json()["error"]["message"]
    free = await post(proxy, session, tools=put["TOOLS"])
    assert free.status_code == 200, "tools that need not be called are not limited so"


async def test_one_tool_of_many_can_be_demanded(start_proxy: StartProxy, engine: Any) -> None:
    engine._max_positions = 1 << 22
    proxy = await start_proxy(max_positions=1 << 22)
    session = proxy.open_session()
    big = {"type": "function", "function": {"name": "big", "parameters": big_schema(10_000)}}
    chosen = {"type": "function", "function": {"name": "add"}}
    answer = await post(proxy, session, tools=[big, ADD], tool_choice=chosen)
    assert answer.status_code == 200, answer.text
