"""What an agent's episode finds: the real proxy with one open session, and a model that says what a test wants."""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from areal.config.rollout import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.proxy import Proxy, Session
from areal.trajectory import export

MAX_POSITIONS = 8192


@cache
def math_tokenizer() -> Any:
    return make_tokenizer(["What is 3 + 4? Sort 5291. That is wrong. Try again. Add two integers."], 320, MAX_POSITIONS)


@dataclass
class Speaker:
    """A model that says what `answer` makes of the prompt's text, and remembers the tokens of both."""

    tokenizer: Any
    answer: Callable[[str], str]
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Ids of each prompt and of what was sampled."""

    def engine(self, *, constrained: bool = True) -> FakeEngine:
        """`constrained=False` lets it break the grammar of an answer, as engines without constrained decoding do."""
        return FakeEngine(
            vocab_size=len(self.tokenizer),
            max_positions=MAX_POSITIONS,
            script=self._speak,
            tokenizer=self.tokenizer,
            constrained=constrained,
        )

    @property
    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(prompt) for prompt, _ in self.turns]

    def _speak(self, prompt: Sequence[int]) -> Sequence[int]:
        text = self.answer(self.tokenizer.decode(prompt))
        # Letter by letter, as no tokenizer would write it: a text that is tokenised again gives other ids.
        pieces = re.findall(r"</?tool_call>|.", text, re.DOTALL)
        ids = [token for piece in pieces for token in self.tokenizer.encode(piece)]
        self.turns.append((list(prompt), [*ids, self.tokenizer.eos_token_id]))
        return self.turns[-1][1]


@dataclass
class Stage:
    proxy: Proxy
    session: Session
    speaker: Speaker

    def kwargs(self, route: str = "in process") -> dict[str, Any]:
        """What is injected into an agent: the shared clients as well, or an address only (`over TCP`)."""
        address = {"base_url": self.session.base_url, "api_key": self.session.api_key}
        if route == "over TCP":
            return address
        return {**address, "http_client": self.proxy.http_client, "httpx2_client": self.proxy.httpx2_client}

    def check_tokens(self) -> None:
        """Each row of the export is a prompt that the engine was given and the very ids that it sampled."""
        rows = export(self.session.tree, "individual", 1.0)
        turns = [(row.input_ids[~row.loss_mask].tolist(), row.input_ids[row.loss_mask].tolist()) for row in rows]
        assert turns == self.speaker.turns

    def check_one_conversation(self, calls: int) -> None:
        """Every call continues the tokens of the one before it: no past was rewritten, nothing branched."""
        nodes = self.session.tree.completions
        assert [node.parent for node in nodes] == [None, *range(calls - 1)]
        assert [node.extends for node in nodes] == [False, *[True] * (calls - 1)]
        assert self.session.tree.rewrites == 0


@asynccontextmanager
async def open_stage(tokenizer: Any, answer: Callable[[str], str], *, constrained: bool = True) -> AsyncIterator[Stage]:
    speaker = Speaker(tokenizer, answer)
    gconfig = GenerationHyperparameters(max_new_tokens=256)
    engine = speaker.engine(constrained=constrained)
    proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=MAX_POSITIONS)
    await proxy.start()
    try:
        yield Stage(proxy, proxy.open_session(), speaker)
    finally:
        await proxy.aclose()
