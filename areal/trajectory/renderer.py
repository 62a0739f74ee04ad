"""Messages to text to token ids and back, for one tokenizer. Owns every call of the tokenizer and its chat template."""

import secrets
from collections.abc import Sequence
from typing import Any

from areal.api.errors import ModelError, RequestError
from areal.trajectory.meaning import Message
from areal.trajectory.parsers import choose
from areal.trajectory.pictures import Picture
from areal.trajectory.sight import Sight
from areal.trajectory.template_messages import TemplateMessages
from areal.trajectory.window import Windows


class Renderer:
    """Shared by all sessions of a process; holds no conversation.

    `tool_parser` and `reasoning_parser` name how the model writes tool calls and thinking; None = as its template does.
    `processor` is the model's, for pictures; None = it sees none.
    Ids go through the tokenizer's Rust core where there is one: its Python wrapper costs more than the work.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        processor: Any = None,
    ) -> None:
        own = getattr(processor, "chat_template", None)
        template = own or getattr(tokenizer, "chat_template", None)
        if not template:
            raise ModelError(
                "the tokenizer must have a chat template to serve conversations, got none; set chat_template"
            )
        self.tokenizer = tokenizer
        self.format = choose(template, tool_parser, reasoning_parser)
        self.sentinel = "turn" + secrets.token_hex(8)
        self.windows = Windows()
        self.sight = None if processor is None else Sight(processor)
        """None = the model sees no pictures."""
        self._template_options = {"chat_template": own} if own else {}
        self._for_template = TemplateMessages(template, self.format)
        self._core = getattr(tokenizer, "backend_tokenizer", None)
        self._for_template.parts_only = "type" in str(template) and self._reads_parts_only()
        self.turn_end_ids = self._find_turn_end_ids()
        if self.sight is not None:
            seen = [{"type": "text", "text": "hi"}, {"type": "image"}]
            self.sight.find_mark(self.render([{"role": "user", "content": seen}], None))

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        """The conversation as text, up to where the assistant begins to speak."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self._for_template(messages),
                    tools=tools,
                    add_generation_prompt=True,
                    tokenize=False,
                    **self._template_options,
                )
            )
        except Exception as error:  # a template is a program of the model's authors: it may raise anything
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error

    def opens_thinking(self, prompt: str) -> bool:
        """Whether a rendered prompt, or the end of one, leaves the model inside its thinking."""
        return self.format.reasoning is not None and self.format.reasoning.opened_by(prompt)

    def encode(self, text: str, pictures: Sequence[Picture] = ()) -> list[int]:
        """Pictures take time: call it in a thread where there are some. Raises RequestError for what is no picture."""
        if self.sight is not None:
            self.sight.check(text, pictures)
        if pictures:
            if self.sight is None:
                raise RequestError("this model sees no pictures: it has no processor; leave them out")
            return self.sight.encode(text, pictures)
        if self._core is not None and self._core.truncation is None and self._core.padding is None:
            return list(self._core.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        """Text with special tokens in it: some models' tool calls are made of those."""
        if self._core is not None:
            return str(self._core.decode(ids, skip_special_tokens=False))
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _reads_parts_only(self) -> bool:
        """Whether the template loses text that is no part, as templates of models that see pictures may."""
        return not self._renders(self.sentinel) and self._renders([{"type": "text", "text": self.sentinel}])

    def _renders(self, content: Any) -> bool:
        try:
            return self.sentinel in self.render([{"role": "user", "content": content}], None)
        except RequestError:
            return False

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
