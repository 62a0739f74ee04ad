"""Messages as a chat template wants them: thinking where it reads it, call ids of the length it insists on, pictures
as parts that name no bytes."""

# MERGED-DOC
# The part of a long conversation that decides how its end is rendered.
#
# Chat templates write a message as its role, its neighbours, the system message, the tools and the last question decide.
# So the end of a long conversation is rendered behind its system messages, its last question and the answer before, and a
# turn costs what it adds. Thinking may be dropped when a new question comes: everything since the last one is kept then.
# Whether that holds for a template is checked on whole conversations: the first few times, and whenever one has doubled.
# Messages to text to token ids and back, for one tokenizer. Owns every call of the tokenizer and its chat template.
# The ids that a new turn adds behind a recorded completion, without tokenising again what was sampled.
#
# The rendered conversation must fall apart into
#
#     the parent's prompt text | the parent's answer | closing of its turn + everything newer
#     known ids                | sampled ids         | to be encoded
#
# If it does not, because the template wrote the past differently this time (it drops earlier thinking, say), there is no
# continuation and the caller starts a new branch.

import re
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from areal.api.errors import ModelError, RequestError
from areal.trajectory.completion import Completion
from areal.trajectory.images import ImageProcessor
from areal.trajectory.message import Message, Picture, same_words, text_of
from areal.trajectory.parsers import AnswerFormat, choose
from areal.trajectory.parsers.mistral import Mistral
from areal.utils import logging

_SHORT_ID = re.compile(r"(?:\A|_)([A-Za-z0-9]{9})\Z")


class TemplateMessages:
    def __init__(self, template: Any, format: AnswerFormat) -> None:
        self._marks = None if "reasoning_content" in str(template) else format.reasoning
        """Put around thinking that the template can only find in the content."""
        self._short_ids = isinstance(format.calls, Mistral)
        self.parts_only = False
        """The template reads text only where it is a part."""

    def __call__(self, messages: list[Message]) -> list[Message]:
        if self._marks is not None or self._short_ids:
            messages = [self._message(message) for message in messages]
        if self.parts_only or any(isinstance(message["content"], list) for message in messages):
            messages = [{**message, "content": self._content(message["content"])} for message in messages]
        return messages

    def _message(self, message: Message) -> Message:
        thought = message.get("reasoning_content")
        if self._marks is not None and thought and message["role"] == "assistant":
            message = {**message, "content": self._marks.render(thought, message["content"])}
        if self._short_ids and message.get("tool_calls"):
            message = {
                **message,
                "tool_calls": [{**call, "id": short_id(call["id"])} for call in message["tool_calls"]],
            }
        if self._short_ids and message.get("tool_call_id"):
            message = {**message, "tool_call_id": short_id(message["tool_call_id"])}
        return message

    def _content(self, content: Any) -> Any:
        if isinstance(content, list):
            return [{"type": "image"} if part.get("type") == "image" else part for part in content]
        return [{"type": "text", "text": content}] if self.parts_only and isinstance(content, str) else content


def short_id(call_id: str) -> str:
    """Nine letters or digits, as Mistral's templates insist: those that the model wrote, else some of our own."""
    written = _SHORT_ID.search(call_id)
    return written[1] if written else blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]


WHOLE = 16
"""Conversations of at most so many messages are rendered whole."""

FIRST_CHECKS = 8


class Windows:
    """Whether a template can be trusted to write the end of a conversation whatever its middle says."""

    def __init__(self) -> None:
        self.trusted = True
        self._checks = 0

    def due(self, depth: int) -> bool:
        """Whether to check a conversation of so many answers."""
        return self._checks < FIRST_CHECKS or depth & (depth - 1) == 0

    def check(self, same: bool) -> None:
        self._checks += 1
        if not same and self.trusted:
            self.trusted = False
            logging.getLogger("trajectory").warning(
                "the chat template writes the end of a conversation as its middle decides; long ones are rendered whole"
            )


def window(before: list[Message], newer: list[Message]) -> list[Message]:
    """Of the messages before an answer, those that decide how it and `newer` are rendered; all if they are few."""
    question = _last_question(before) if len(before) > WHOLE else None
    if question is None:
        return before
    system = next(place for place, message in enumerate(before) if message["role"] != "system")
    begin = question + 1
    if all(message["role"] in ("assistant", "tool") for message in newer):
        begin = max(begin, _last_answer(before))
    return [*before[:system], before[question], *before[begin:]]


def _last_question(messages: list[Message]) -> int | None:
    """Some clients send tool results as a user's words; templates that know this do not take them for a question."""
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message["role"] == "user" and not text_of(message["content"]).startswith("<tool_response>"):
            return place
    return None


def _last_answer(messages: list[Message]) -> int:
    places = range(len(messages) - 1, -1, -1)
    return next((place for place in places if messages[place]["role"] == "assistant"), 0)


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
        self.sight = None if processor is None else ImageProcessor(processor)
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


Tools = list[dict[str, Any]] | None


def newer_text(
    renderer: Renderer, parent: Completion, before: list[Message], newer: list[Message], tools: Tools
) -> str | None:
    """The text behind the parent's answer, given the messages before and behind it. None = a branch must begin."""
    part = window(before, newer) if renderer.windows.trusted and tools is parent.tools else before
    if part is before:
        return _newer_text(renderer, parent, before, newer, tools)
    try:
        text = _newer_text(renderer, parent, part, newer, tools)
    except RequestError:
        text = None  # the template may accept the whole
    if text is not None and not renderer.windows.due(parent.depth):
        return text
    whole = _newer_text(renderer, parent, before, newer, tools)
    if text is not None:
        renderer.windows.check(whole == text)
    return whole


def newer_ids(renderer: Renderer, parent: Completion, newer: str, pictures: Sequence[Picture] = ()) -> list[int]:
    """The closing begins with the end token; where the model sampled it, it is there already."""
    if parent.end_id is not None:
        closing = newer.lstrip()  # white space that a template puts before its end token came too late
        if closing.startswith(renderer.decode([parent.end_id])):
            ids = renderer.encode(closing, pictures)
            if ids[:1] == [parent.end_id]:
                return ids[1:]
    return renderer.encode(newer, pictures)


def _newer_text(
    renderer: Renderer, parent: Completion, before: list[Message], newer: list[Message], tools: Tools
) -> str | None:
    prompt = renderer.render(before, parent.tools)
    text = renderer.render([*before, parent.message, *newer], tools)
    if not text.startswith(prompt):
        return None
    rest = text[len(prompt) :]
    if rest.startswith(parent.text):
        return rest[len(parent.text) :]
    behind = _behind_end(renderer, parent, rest)
    return behind if behind is not None else _behind_mark(renderer, parent, before, newer, tools, prompt, rest)


def _behind_end(renderer: Renderer, parent: Completion, rest: str) -> str | None:
    """What follows an answer that the template spells unlike the model did, found by the end token it sampled."""
    if parent.end_id is None:
        return None
    at = rest.find(renderer.decode([parent.end_id]))
    return rest[at:] if at >= 0 and _says(renderer, rest[:at], parent) else None


def _behind_mark(
    renderer: Renderer,
    parent: Completion,
    before: list[Message],
    newer: list[Message],
    tools: Tools,
    prompt: str,
    rest: str,
) -> str | None:
    """The same for an answer that was cut off, found by a mark in its place."""
    marked = {key: value for key, value in parent.message.items() if key != "tool_calls"} | {
        "content": renderer.sentinel
    }
    try:
        text = renderer.render([*before, marked, *newer], tools)
    except RequestError:
        return None  # a template may refuse tool results behind an answer without calls; a new branch is always right
    earlier, _, behind = text.partition(renderer.sentinel)
    if not earlier.startswith(prompt) or renderer.sentinel in behind or not rest.endswith(behind):
        return None
    return behind if _says(renderer, rest[: len(rest) - len(behind)], parent) else None


def _says(renderer: Renderer, rendered: str, parent: Completion) -> bool:
    """Whether a rendered turn reads as the parent's message; templates may change white space and spell calls anew."""
    said = renderer.format.read(rendered, parent.tools, thinking=parent.thinking)
    message = parent.message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return (
        same_words(said.content, message["content"])
        and same_words(said.reasoning, message.get("reasoning_content", ""))
        and [(call.name, call.arguments) for call in said.calls] == calls
    )
