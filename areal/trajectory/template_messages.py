"""Messages as a chat template wants them: thinking where it reads it, call ids of the length it insists on, pictures
as parts that name no bytes."""

import re
from hashlib import blake2b
from typing import Any

from areal.trajectory.meaning import Message
from areal.trajectory.parsers import AnswerFormat
from areal.trajectory.parsers.mistral import Mistral

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
