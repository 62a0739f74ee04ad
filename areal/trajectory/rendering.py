"""Messages to token ids and back, for one model. Owns every call of its tokenizer, chat template and image processor.

A special token that a message merely spells stays text (`special_tokens`): rendered text has marks in such spellings,
which `encode` understands and `plain` removes before it is shown.

It also says which ids a new turn adds to a recorded completion (`added_text`, `added_ids`). What the model sampled is
never tokenised again, so the rendered conversation must split into

    the parent's prompt | the parent's answer | the end of its turn and everything newer
    known ids           | sampled ids         | to be encoded

If it does not, because the template renders the past differently this time (it drops earlier thinking, say), no ids can
be added, and the caller starts a new branch.

A turn costs what it adds. How a template renders a message depends on its role, its neighbours, the system messages,
the tools and the last question, so the end of a long conversation is rendered without its middle (`_without_middle`).
Whether a template keeps to that is checked against the whole conversation: at first a few times, then whenever a
conversation has doubled. One that does not gets whole conversations from then on.

Text that cannot fit the model is refused before it is tokenised (`require_room`, `encode`): a tokenizer takes a second
and half a gigabyte for a million tokens.
"""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

import orjson

from areal.api.errors import ContextLengthError, ModelError, RequestError
from areal.trajectory.images import ImageProcessor
from areal.trajectory.message import Image, Message, same_words, text_of
from areal.trajectory.parsers import AnswerFormat, choose
from areal.trajectory.parsers.base import Tools
from areal.trajectory.special_tokens import SpecialTokens
from areal.utils import logging

K = TypeVar("K")
V = TypeVar("V")

WHOLE_UP_TO = 16
"""Conversations of up to this many messages are rendered whole."""
LONG_TEXT = 8192
"""Characters beyond which it takes milliseconds to encode a text: call `encode` in a thread."""
SHORT_TEXT = 2048
"""Characters up to which what a text was rendered from, and encoded to, is kept for the next who asks the same."""
MAX_KEPT = 512
"""This many short texts: a token takes 36 bytes, and a character at most four tokens."""
SAMPLE = 1 << 16
"""Characters that are encoded at a time to find out whether a text fits."""
THINKING_SWITCH = "enable_thinking"
"""What templates that leave it open call the choice whether the model thinks before it answers."""
FIRST_CHECKS = 8
"""The first this many shortened conversations are also rendered whole, for comparison."""


class Parent(Protocol):
    """What must be known of the completion that a conversation continues."""

    message: Message
    text: str
    """The sampled text without its end token."""
    end_id: int | None
    """The stop token that ended it; None if it was cut off or met a stop text."""
    tools: Tools | None
    thinking: bool
    """Its prompt ended inside thinking."""
    depth: int
    """Completions from the beginning of the conversation, itself counted."""


class Renderer:
    """Shared by all sessions of a process; holds no conversation."""

    def __init__(
        self,
        tokenizer: Any,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        processor: Any = None,
    ) -> None:
        """`tool_parser` and `reasoning_parser` name how the model writes tool calls and thinking; None = as its chat
        template does. `processor` is the model's image processor; None = it takes no images."""
        own_template = getattr(processor, "chat_template", None)
        template = own_template or getattr(tokenizer, "chat_template", None)
        if not template:
            raise ModelError(
                "the tokenizer must have a chat template to serve conversations, got none; set chat_template"
            )
        self.tokenizer = tokenizer
        self.format = choose(template, tool_parser, reasoning_parser)
        self.sentinel = "turn" + secrets.token_hex(8)
        """Text that no conversation contains, to find a message's place in what the template renders."""
        self.skips_middle = True
        """Long conversations are rendered without their middle; False once the template was seen to depend on it."""
        self.image_processor = None if processor is None else ImageProcessor(processor)
        """None = the model takes no images."""
        self.thinking_switch = THINKING_SWITCH in str(template)
        """The template lets a call choose whether the model thinks first."""
        self._checks = 0
        self._varies = any(word in str(template) for word in ("strftime_now", "random"))
        """The template may write the same conversation in another way the next time."""
        self._rendered: dict[bytes, str] = {}
        """By what the template got; with the next, only of short texts and bounded. Threads share both."""
        self._encoded: dict[str, list[int]] = {}
        self._template_options = {"chat_template": own_template} if own_template else {}
        self._special_tokens = SpecialTokens(tokenizer)
        self._template_input = _TemplateInput(template, self.format, self.plain)
        # The tokenizer's Rust core: its Python wrapper costs more than the work.
        self._core = getattr(tokenizer, "backend_tokenizer", None)
        self._template_input.parts_only = "type" in str(template) and self._reads_parts_only()
        self._special_tokens = SpecialTokens(tokenizer, self._find_turn_ids())
        self.turn_end_ids = self._find_turn_end_ids()
        """The special token with which the template closes an assistant's turn; not every tokenizer calls it `eos`."""
        if self.image_processor is not None:
            content = [{"type": "text", "text": "hi"}, {"type": "image"}]
            self.image_processor.find_placeholder(self.render([{"role": "user", "content": content}], None))

    def render(self, messages: list[Message], tools: Tools | None, thinks: bool | None = None) -> str:
        """The conversation as text, up to where the assistant begins to speak, for `encode` or `plain`.

        `thinks` = whether it is to think first, if the template leaves that open; None = as the template does.
        """
        return self._render(self._special_tokens.broken(messages), self._special_tokens.broken(tools), thinks)

    def begin_answer(self, rendered: str, beginning: str) -> str:
        """Rendered text in which the assistant has begun to speak."""
        return rendered + "".join(self._special_tokens.broken([beginning]))

    def _render(self, messages: list[Message], tools: Tools | None, thinks: bool | None) -> str:
        """The samples of a group ask the same, and a turn begins with the one before: such text is rendered once."""
        key = self._key_of(messages, tools, thinks)
        text = None if key is None else self._rendered.get(key)
        if text is None:
            text = self._rendered_anew(messages, tools, thinks)
            if key is not None:
                _keep(self._rendered, key, text)
        return text

    def _key_of(self, messages: list[Message], tools: Tools | None, thinks: bool | None) -> bytes | None:
        """What the template gets; None = it may be rendered differently another time, or is long, or cannot be told."""
        if self._varies:
            return None
        try:
            key = orjson.dumps(messages, option=_AS_IS)
            if tools is not None:
                key += orjson.dumps(tools, option=_AS_IS)
            if thinks is not None:
                key += b"1" if thinks else b"0"
        except TypeError:  # images, numbers beyond 64 bits, half of a surrogate pair, objects of a workflow
            return None
        return key if len(key) <= SHORT_TEXT and b"null" not in key else None  # NaN is written so too

    def _rendered_anew(self, messages: list[Message], tools: Tools | None, thinks: bool | None) -> str:
        options = self._template_options if thinks is None else {**self._template_options, THINKING_SWITCH: thinks}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self._template_input(messages),
                    tools=tools,
                    add_generation_prompt=True,
                    tokenize=False,
                    **options,
                )
            )
        except Exception as error:  # a template is a program of the model's authors: it may raise anything
            raise RequestError(f"the model's chat template refuses these messages: {self.plain(str(error))}") from error

    def plain(self, rendered: str) -> str:
        """Rendered text as a person reads it."""
        return self._special_tokens.plain(rendered)

    def opens_thinking(self, prompt: str) -> bool:
        """Whether a rendered prompt, or the end of one, leaves the model inside its thinking."""
        return self.format.reasoning is not None and self.format.reasoning.opened_by(prompt)

    def require_room(self, messages: Sequence[Message], tools: Tools | None, positions: int) -> None:
        """Raises ContextLengthError if the messages take more tokens than that, whatever the tokenizer makes of them.

        A message, a tool and a call take a token at least. No template drops what a system, a user or a tool says.
        """
        calls = sum(len(message.get("tool_calls", ())) for message in messages)
        if (count := len(messages) + len(tools or ()) + calls) > positions:
            raise _too_long(f"{count} messages, tools and calls, which take a token each at least", positions)
        if self._longest_token is not None:
            said = [text_of(message["content"]) for message in messages if message["role"] != "assistant"]
            size = sum(len(text.strip()) for text in said)
            if size > positions * self._longest_token:
                raise _too_long(f"{size} characters, and a token covers at most {self._longest_token}", positions)

    def encode(self, text: str, images: Sequence[Image] = (), positions: int | None = None) -> list[int]:
        """Images and long texts take time: call it in a thread for these. Raises RequestError for a broken image.

        `positions` = how many tokens fit; of text that takes far more, little is tokenised: ContextLengthError.
        """
        if positions is not None and len(text) > LONG_TEXT:
            self._require_room_for_text(text, positions)
        if self.image_processor is not None:
            self.image_processor.check(self.plain(text), images)
        elif images:
            raise RequestError("this model takes no images: it has no processor; leave them out")
        if self.image_processor is None or not images:
            return self._encode_rendered(text)
        if self._special_tokens.mark in text:
            return self.image_processor.fill(self._encode_rendered(text), images)
        return self.image_processor.encode(text, images)

    def encode_raw(self, text: str, positions: int) -> list[int]:
        """The ids of a prompt that no template wrote; it may spell special tokens. Raises ContextLengthError."""
        if len(text) > LONG_TEXT:
            self._require_room_for_text(text, positions)
        return list(self.tokenizer.encode(text))

    def _require_room_for_text(self, text: str, positions: int) -> None:
        size = len(self.plain(text).encode(errors="replace"))
        if size <= 4 * positions:
            return  # a token stands for a byte at least, so this takes no more than four times what fits
        if self._longest_token is not None and size > positions * self._longest_token:
            raise _too_long(f"{size} bytes, and a token covers at most {self._longest_token}", positions)
        count = 0
        for begin in range(0, len(text), SAMPLE):
            count += len(self._encode_rendered(text[begin : begin + SAMPLE]))
            if count > 2 * positions:  # not once: cutting the text costs tokens too
                raise _too_long(f"{size} bytes, of which the first {begin + SAMPLE} take more tokens", positions)

    def _encode_rendered(self, text: str) -> list[int]:
        known = self._encoded.get(text)
        if known is None:
            known = self._encoded_anew(text)
            if len(text) <= SHORT_TEXT:
                _keep(self._encoded, text, known)
        return list(known)

    def _encoded_anew(self, text: str) -> list[int]:
        mark = self._special_tokens.mark
        if mark not in text:
            return self._encode_text(text)
        ids = self._special_tokens.encode(text)
        if ids is None:  # nothing that is cut in two is a special token
            ids = [token for piece in text.split(mark) for token in self._encode_text(piece)]
        return ids

    def _encode_text(self, text: str) -> list[int]:
        core = self._core
        # The wrapper leaves the options of its last call in the core, even of calls made elsewhere.
        if core is not None and core.truncation is None and core.padding is None and not core.encode_special_tokens:
            return list(core.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        """Text that includes special tokens: some models' tool calls are made of them."""
        if self._core is not None:
            return str(self._core.decode(ids, skip_special_tokens=False))
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def added_text(
        self,
        parent: Parent,
        before: list[Message],
        newer: list[Message],
        tools: Tools | None,
        thinks: bool | None = None,
    ) -> str | None:
        """What follows the parent's answer, given the messages before and after it. None = a branch must begin."""
        part = _without_middle(before, newer) if self.skips_middle and tools is parent.tools else before
        if part is before:
            return self._text_after(parent, before, newer, tools, thinks)
        try:
            text = self._text_after(parent, part, newer, tools, thinks)
        except RequestError:
            text = None  # the template may accept the whole conversation
        check_due = self._checks < FIRST_CHECKS or parent.depth & (parent.depth - 1) == 0
        if text is not None and not check_due:
            return text
        whole = self._text_after(parent, before, newer, tools, thinks)
        if text is not None:
            self._checks += 1
            if text != whole and self.skips_middle:
                self.skips_middle = False
                logging.getLogger("trajectory").warning(
                    "how the chat template renders the end of a conversation depends on its middle; "
                    "long conversations are rendered whole, which takes longer"
                )
        return whole

    def added_ids(
        self, parent: Parent, text: str, images: Sequence[Image] = (), positions: int | None = None
    ) -> list[int]:
        """The ids of added text. It begins with the end of the parent's turn; a sampled end token is there already."""
        if parent.end_id is not None:
            closing = text.lstrip()  # the end token was sampled before any white space that the template puts there
            if closing.startswith(self.decode([parent.end_id])):
                ids = self.encode(closing, images, positions)
                if ids[:1] == [parent.end_id]:
                    return ids[1:]
        return self.encode(text, images, positions)

    def _text_after(
        self, parent: Parent, before: list[Message], newer: list[Message], tools: Tools | None, thinks: bool | None
    ) -> str | None:
        messages = self._special_tokens.broken([*before, parent.message, *newer])
        offered = self._special_tokens.broken(tools)
        earlier = offered if tools is parent.tools else self._special_tokens.broken(parent.tools)
        prompt = self._render(messages[: len(before)], earlier, thinks)
        text = self._render(messages, offered, thinks)
        if not text.startswith(prompt):
            return None
        rest = text[len(prompt) :]
        after = self._special_tokens.after(rest, parent.text)
        if after is not None:
            return after
        found = self._from_end_token(parent, rest)
        if found is not None:
            return found
        return self._after_sentinel(parent, before, newer, tools, thinks, prompt, rest)

    def _from_end_token(self, parent: Parent, rest: str) -> str | None:
        """What follows an answer that the template spells unlike the model did, found by the end token it sampled."""
        if parent.end_id is None:
            return None
        at = rest.find(self.decode([parent.end_id]))
        return rest[at:] if at >= 0 and self._reads_as(rest[:at], parent) else None

    def _after_sentinel(
        self,
        parent: Parent,
        before: list[Message],
        newer: list[Message],
        tools: Tools | None,
        thinks: bool | None,
        prompt: str,
        rest: str,
    ) -> str | None:
        """The same for an answer that was cut off, found by rendering the sentinel in its place."""
        marked = {key: value for key, value in parent.message.items() if key != "tool_calls"}
        marked["content"] = self.sentinel
        try:
            text = self.render([*before, marked, *newer], tools, thinks)
        except RequestError:
            return None  # a template may refuse tool results after an answer without calls; a branch is always right
        earlier, _, after = text.partition(self.sentinel)
        if not earlier.startswith(prompt) or self.sentinel in after or not rest.endswith(after):
            return None
        return after if self._reads_as(rest[: len(rest) - len(after)], parent) else None

    def _reads_as(self, rendered: str, parent: Parent) -> bool:
        """Whether a rendered turn says what the parent's message does; white space and the form of calls may differ."""
        parsed = self.format.read(self.plain(rendered), parent.tools, thinking=parent.thinking)
        message = parent.message
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        return (
            same_words(parsed.content, message["content"])
            and same_words(parsed.reasoning, message.get("reasoning_content", ""))
            and [(call.name, call.arguments) for call in parsed.calls] == calls
        )

    @cached_property
    def _longest_token(self) -> int | None:
        """Bytes of text that a token stands for at most; None = not known."""
        return None if self._core is None else _longest_token(self._core)

    def _reads_parts_only(self) -> bool:
        """Whether the template loses text that is not a part, as templates of models with images may."""
        return not self._renders(self.sentinel) and self._renders([{"type": "text", "text": self.sentinel}])

    def _renders(self, content: Any) -> bool:
        try:
            return self.sentinel in self.render([{"role": "user", "content": content}], None)
        except RequestError:
            return False

    def _find_turn_ids(self) -> list[int]:
        """The added tokens in a conversation without calls and thinking: those that begin and end turns."""
        reasoning = self.format.reasoning
        within = () if reasoning is None else (reasoning.open, reasoning.close)
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        ids = self._encode_text("".join(self._probe()))
        return [token for token in ids if token in added and added[token].content not in within]

    def _find_turn_end_ids(self) -> list[int]:
        _, closing = self._probe()
        first = self._encode_text(closing.lstrip())[:1]
        return [token for token in first if token in self._special_tokens.special_ids]

    def _probe(self) -> tuple[str, str]:
        """What the template writes before and after an answer; nothing if it asks for more than a question."""
        turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": self.sentinel}]
        try:
            before, found, closing = self.render(turn, None).partition(self.sentinel)
        except RequestError:
            return "", ""  # it still serves the conversations that it accepts
        return (before, closing) if found else ("", "")


_AS_IS = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def _keep(known: dict[K, V], key: K, value: V) -> None:
    """All are dropped at once: each step is one of the interpreter's, so threads need no lock."""
    if len(known) >= MAX_KEPT:
        known.clear()
    known[key] = value


def _too_long(what: str, positions: int) -> ContextLengthError:
    return ContextLengthError(f"the model has {positions} positions, the messages have {what}; shorten them")


def _longest_token(core: Any) -> int | None:
    """Known of byte-level BPE only: others may drop white space, or take a long word for one unknown token."""
    from tokenizers.pre_tokenizers import ByteLevel

    splits = _parts(core.pre_tokenizer, "pretokenizers")
    keeps_all = all(part["type"] in ("ByteLevel", "Digits", "Split") for part in splits)
    keeps_all &= all(part.get("behavior") != "Removed" for part in splits)
    keeps_all &= any(part["type"] == "ByteLevel" for part in splits)
    keeps_all &= type(core.model).__name__ == "BPE" and all(
        core.token_to_id(byte) is not None for byte in ByteLevel.alphabet()
    )
    added = core.get_added_tokens_decoder().values()
    keeps_all &= not any(token.lstrip or token.rstrip for token in added)
    normal = {part["type"] for part in _parts(core.normalizer, "normalizers")}
    if not keeps_all or not normal <= {"NFC"}:
        return None
    # In the vocabulary a character is a byte; an added token is plain text. NFC makes a third of a text at best.
    longest = max(max(map(len, core.get_vocab(with_added_tokens=False))), *(len(t.content.encode()) for t in added), 1)
    return 3 * longest if normal else longest


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """The settings of a tokenizer's component, or of each of its components."""
    settings = {} if component is None else json.loads(component.__getstate__())
    return list(settings.get(name, [settings] if settings else []))


def _without_middle(before: list[Message], newer: list[Message]) -> list[Message]:
    """Of the messages before an answer, those that decide how it and `newer` are rendered; all if they are few.

    Templates may drop thinking when a new question comes, so with one everything since the last question is kept.
    """
    question = _last_question(before) if len(before) > WHOLE_UP_TO else None
    if question is None:
        return before
    system = next(place for place, message in enumerate(before) if message["role"] != "system")
    begin = question + 1
    if all(message["role"] in ("assistant", "tool") for message in newer):
        begin = max(begin, _last_answer(before))
    return [*before[:system], before[question], *before[begin:]]


def _last_question(messages: list[Message]) -> int | None:
    """Some clients send tool results as the user's words; templates that know this do not take them for a question."""
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message["role"] == "user" and not text_of(message["content"]).startswith("<tool_response>"):
            return place
    return None


def _last_answer(messages: list[Message]) -> int:
    places = range(len(messages) - 1, -1, -1)
    return next((place for place in places if messages[place]["role"] == "assistant"), 0)


class _TemplateInput:
    """Messages as a chat template wants them: thinking where it looks for it, call ids of the length it insists on,
    images as parts without bytes."""

    def __init__(self, template: Any, format: AnswerFormat, plain: Callable[[str], str]) -> None:
        self._marks = None if "reasoning_content" in str(template) else format.reasoning
        """Put around thinking that the template can only find in the content."""
        self._short_ids = format.calls.short_call_ids
        self._plain = plain
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
            calls = [{**call, "id": _short_id(self._plain(call["id"]))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        if self._short_ids and message.get("tool_call_id"):
            message = {**message, "tool_call_id": _short_id(self._plain(message["tool_call_id"]))}
        return message

    def _content(self, content: Any) -> Any:
        if isinstance(content, list):
            return [{"type": "image"} if part.get("type") == "image" else part for part in content]
        return [{"type": "text", "text": content}] if self.parts_only and isinstance(content, str) else content


_SHORT_ID = re.compile(r"(?:\A|_)([A-Za-z0-9]{9})\Z")


def _short_id(call_id: str) -> str:
    """Nine letters or digits, as Mistral's templates insist: those that the model wrote, else some of our own."""
    written = _SHORT_ID.search(call_id)
    return written[1] if written else blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]
