"""What a framework's agent finds when it runs, and whether its tokens were recorded as they were sampled."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.engine.inference.fake import FakeEngine
from areal.proxy import Proxy, Session
from areal.trajectory import export

MAX_POSITIONS = 4096

SUM: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
TOOL_RESULT = "<|im_start|>tool\n7<|im_end|>"


def use_the_calculator(prompt: str) -> str:
    """A model that calls the tool, reads its result and answers."""
    return "It is 7." if TOOL_RESULT in prompt else CALL


@dataclass
class Talker:
    """A model that says what `answer` makes of the prompt's text, and remembers the tokens of both."""

    tokenizer: Any
    answer: Callable[[str], str]
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Ids of each prompt and of what was sampled."""

    def say(self, prompt: list[int]) -> list[int]:
        text = self.answer(self.tokenizer.decode(prompt))
        # Letter by letter, as no tokenizer would write it: a text that is tokenised again gives other ids.
        said = [
            token for piece in re.findall(r"</?tool_call>|.", text, re.DOTALL) for token in self.tokenizer.encode(piece)
        ]
        self.turns.append((prompt, [*said, self.tokenizer.eos_token_id]))
        return self.turns[-1][1]

    @property
    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(prompt) for prompt, _ in self.turns]


class LaxEngine(FakeEngine):
    """Lets a model break the grammar of its answer, as one that is cut off does."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return await super().agenerate(replace(req, grammar=None))


@dataclass
class Stage:
    """A proxy with one open session, as an agent's episode finds it."""

    proxy: Proxy
    session: Session
    talker: Talker

    def kwargs(self, door: str = "in process") -> dict[str, Any]:
        """What is injected into an agent: with the shared clients, or with an address only."""
        address = {"base_url": self.session.base_url, "api_key": self.session.api_key}
        if door == "over TCP":
            return address
        clients = {"http_client": self.proxy.http_client, "httpx2_client": self.proxy.httpx2_client}
        return {**address, **clients}

    def check_tokens(self) -> None:
        """Each row of the export is a prompt that the engine was given and the very ids that it sampled."""
        rows = export(self.session.tree, "individual", 1.0)
        turns = [(row.input_ids[~row.loss_mask].tolist(), row.input_ids[row.loss_mask].tolist()) for row in rows]
        assert turns == self.talker.turns

    def check_one_conversation(self, calls: int) -> None:
        """Every call continues the tokens of the one before it: nothing was written anew, nothing branched."""
        nodes = self.session.tree.completions
        assert [node.parent for node in nodes] == [None, *range(calls - 1)]
        assert [node.extends for node in nodes] == [False, *[True] * (calls - 1)]
        assert self.session.tree.rewrites == 0
