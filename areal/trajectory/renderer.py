"""Messages to text to token ids and back, for one tokenizer. Owns every call of the tokenizer and its chat template."""

import secrets
from typing import Any

from areal.api.errors import ModelError, RequestError
from areal.trajectory.meaning import Message
from areal.trajectory.parsers import choose
from areal.trajectory.template_messages import TemplateMessages
from areal.trajectory.window import Windows


class Renderer:
    """Shared by all sessions of a process; holds no conversation.

    `tool_parser` and `reasoning_parser` name how the model writes tool calls and thinking; None = as its template does.
    Ids go through the tokenizer's Rust core where there is one: its Python wrapper costs more than the work.
    """

    def __init__(self, tokenizer: Any, tool_parser: str | None = None, reasoning_parser: str | None = None) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ModelError(
                "the tokenizer must have a chat template to serve conversations, got none; set chat_template"
            )
        self.tokenizer = tokenizer
        self.format = choose(template, tool_parser, reasoning_parser)
        self.sentinel = "turn" + secrets.token_hex(8)
        self.windows = Windows()
        self._for_template = TemplateMessages(template, self.format)
        self._core = getattr(tokenizer, "backend_tokenizer", None)
        self.turn_end_ids = self._find_turn_end_ids()

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        """The conversation as text, up to where the assistant begins to speak."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self._for_template(messages), tools=tools, add_generation_prompt=True, tokenize=False
                )
            )
        except Exception as error:  # a template is a program of the model's authors: it may raise anything
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error

    def opens_thinking(self, prompt: str) -> bool:
        """Whether a rendered prompt, or the end of one, leaves the model inside its thinking."""
        return self.format.reasoning is not None and self.format.reasoning.opened_by(prompt)

    def encode(self, text: str) -> list[int]:
        if self._core is not None and self._core.truncation is None and self._core.padding is None:
            return list(self._core.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        """Text with special tokens in it: some models' tool calls are made of those."""
        if self._core is not None:
            return str(self._core.decode(ids, skip_special_tokens=False))
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _find_turn_end_ids(self) -> list[int]:
        """The special token with which the template closes an assistant's turn; not every tokenizer calls it `eos`."""
        turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": self.sentinel}]
        try:
            _, found, closing = self.render(turn, None).partition(self.sentinel)
        except RequestError:
            return []  # a template that asks for more than this still serves the conversations it accepts
        first = self.encode(closing.lstrip())[:1] if found else []
        return [token for token in first if token in self._special_ids()]

    def _special_ids(self) -> set[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
