from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.config.rollout import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.proxy import Proxy, Session

MAX_POSITIONS = 4096


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(["What is 3 + 4? Sort 5291. That is wrong. Try again. Add two integers."], 320, MAX_POSITIONS)


class FreeSpeech(FakeEngine):
    """Says what it is told even where a grammar forbids it, as engines without constrained decoding do."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return await super().agenerate(replace(req, grammar=None))


@dataclass
class Speaker:
    """An engine that says what `answer` makes of the prompt's text, and remembers the prompts."""

    tokenizer: Any
    answer: Callable[[str], str]
    prompts: list[str] = field(default_factory=list)

    def engine(self) -> FakeEngine:
        return FreeSpeech(
            vocab_size=len(self.tokenizer),
            max_positions=MAX_POSITIONS,
            script=self._script,
            tokenizer=self.tokenizer,
        )

    def _script(self, ids: Sequence[int]) -> Sequence[int]:
        self.prompts.append(self.tokenizer.decode(ids))
        said: list[int] = self.tokenizer.encode(self.answer(self.prompts[-1]))
        return [*said, self.tokenizer.eos_token_id]


@dataclass
class Stage:
    """A proxy with one open session, as an agent's episode finds it."""

    proxy: Proxy
    session: Session
    speaker: Speaker

    @property
    def kwargs(self) -> dict[str, Any]:
        """What is injected into an agent."""
        return {
            "base_url": self.session.base_url,
            "api_key": self.session.api_key,
            "http_client": self.proxy.http_client,
        }


StageMaker = Callable[[Callable[[str], str]], Any]


@pytest.fixture
def speaker(tokenizer: Any) -> Callable[[Callable[[str], str]], Speaker]:
    return lambda answer: Speaker(tokenizer, answer)


@pytest.fixture
def stage(tokenizer: Any) -> StageMaker:
    """`async with stage(answer) as s`: a proxy whose model answers a prompt's text with `answer(text)`."""

    @asynccontextmanager
    async def make(answer: Callable[[str], str]) -> AsyncIterator[Stage]:
        speaker = Speaker(tokenizer, answer)
        gconfig = GenerationHyperparameters(max_new_tokens=256)
        proxy = Proxy(speaker.engine(), tokenizer, gconfig=gconfig, max_positions=MAX_POSITIONS)
        await proxy.start()
        try:
            yield Stage(proxy, proxy.open_session(), speaker)
        finally:
            await proxy.aclose()

    return make
