"""A conversation with a model that says what a test wants."""

from dataclasses import dataclass
from typing import Any

from areal.api.io_struct import ModelResponse, StopReason
from areal.trajectory import Tree
from areal.trajectory.answer import read_answer
from areal.trajectory.tree import Completion


@dataclass
class Talk:
    """A conversation with a scripted model, on one tree."""

    tree: Tree

    def ids(self, text: str) -> list[int]:
        return self.tree.renderer.encode(text)

    @property
    def end(self) -> int:
        return int(self.tree.renderer.tokenizer.eos_token_id)

    def say(
        self,
        messages: list[dict[str, Any]],
        answer: str | list[int],
        *,
        stop_reason: StopReason = "stop",
        stop: tuple[str, ...] = (),
        tools: list[dict[str, Any]] | None = None,
        temperature: float = 1.0,
        **where: Any,
    ) -> Completion:
        """The model answers with this text, or with exactly these ids."""
        prompt = self.tree.prompt(messages, tools)
        output = [*self.ids(answer), self.end] if isinstance(answer, str) else answer
        count = len(self.tree.completions)
        response = ModelResponse(
            input_tokens=prompt.ids,
            output_tokens=output,
            output_logprobs=[-0.5 - count] * len(output),
            output_versions=[count] * len(output),
            stop_reason=stop_reason,
            digests={count: f"digest {count}"},
        )
        read = read_answer(
            self.tree.renderer,
            response,
            completion_id=str(count),
            stop_ids=[self.end],
            stop_texts=stop,
            tools=prompt.tools,
            thinking=prompt.thinking,
        )
        return self.tree.add(prompt, response, read, completion_id=f"id-{count}", temperature=temperature, **where)
