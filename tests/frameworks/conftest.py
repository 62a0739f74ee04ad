"""Agents of every framework against a real proxy, whose model says what a test tells it to say."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from framework_stage import MAX_POSITIONS, LaxEngine, Stage, Talker

from areal.config.rollout import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.proxy import Proxy

StageMaker = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(["What is 3 + 4? Sort 5291. That is wrong. Try again. Add two integers."], 320, MAX_POSITIONS)


@pytest.fixture
def stage(tokenizer: Any) -> StageMaker:
    """`async with stage(answer) as s`: a proxy whose model answers a prompt's text with `answer(text)`.

    With `lax=True` it may say what the request forbids.
    """

    @asynccontextmanager
    async def make(answer: Callable[[str], str], *, lax: bool = False) -> AsyncIterator[Stage]:
        talker = Talker(tokenizer, answer)

        def script(ids: Sequence[int]) -> Sequence[int]:
            return talker.say(list(ids))

        engine = (LaxEngine if lax else FakeEngine)(
            vocab_size=len(tokenizer), max_positions=MAX_POSITIONS, script=script, tokenizer=tokenizer
        )
        gconfig = GenerationHyperparameters(max_new_tokens=256)
        proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=MAX_POSITIONS)
        await proxy.start()
        try:
            yield Stage(proxy, proxy.open_session(), talker)
        finally:
            await proxy.aclose()

    return make
