"""One completion of a conversation: a node of the tree, holding only what its parent does not."""

import time
from dataclasses import dataclass, field
from typing import Any

from areal.api.io_struct import StopReason
from areal.api.messages import Array
from areal.trajectory.message import Digest, Message, Picture


@dataclass(slots=True)
class Draft:
    """Where a call stands in the tree, as text that is still to be encoded."""

    parent: "Completion | None"
    """The completion whose conversation this one continues."""
    extends: bool
    """The text comes behind the parent's ids; False where the conversation goes on but the template wrote it anew."""
    text: str
    pictures: list[Picture]
    """Those whose places are in the text, in order."""
    messages: list[Message]
    """What comes after the parent's answer."""
    path: Digest
    """Meaning of the whole conversation so far."""
    tools: list[dict[str, Any]] | None
    """What the model may call; None = nothing is a call."""
    thinking: bool
    """The text ends inside thinking, so the answer begins with it."""


@dataclass(slots=True)
class Prompt:
    """Where a call stands in the tree, and the token ids that the engine is asked to continue."""

    ids: list[int]
    parent: int | None
    """Index of the completion whose conversation this one continues."""
    extends: bool
    """The ids are the parent's ids and more; False where the conversation goes on but the template wrote it anew."""
    new_ids: list[int]
    """What comes after the parent's ids; all ids if this prompt does not extend them."""
    messages: list[Message]
    """What comes after the parent's answer."""
    path: Digest
    """Meaning of the whole conversation so far."""
    tools: list[dict[str, Any]] | None
    """What the model may call; None = nothing is a call."""
    thinking: bool
    """The prompt ends inside thinking, so the answer begins with it."""
    pictures: list[Picture] = field(default_factory=list)
    """Those whose places are in the ids, in order."""
    new_pictures: list[Picture] = field(default_factory=list)
    """Those whose places are in the new ids."""
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def images(self) -> list[bytes]:
        return [picture.data for picture in self.pictures]


@dataclass(slots=True)
class Completion:
    """A finished answer. Arrays are 1-D and, but for `prompt_ids`, as long as the answer."""

    id: str
    index: int
    """Place in the tree, in order of finishing."""
    choice: int
    """Which of the `n` answers to one request."""
    parent: int | None
    extends: bool
    depth: int
    """Completions that it continues, itself counted."""
    messages: list[Message]
    message: Message
    """The answer as the client got it."""
    text: str
    """The sampled text without its end token: the message before thinking and tool calls were read out of it."""
    tools: list[dict[str, Any]] | None
    """Shared with every completion that was offered the same."""
    thinking: bool
    """The prompt had opened its thinking already."""
    prompt_ids: Array
    """int32: the prompt's ids beyond the parent's, or all of them if `extends` is False."""
    pictures: list[Picture]
    """Those whose places are in these ids."""
    output_ids: Array
    """int32"""
    logprobs: Array
    """float32: of the temperature-scaled policy."""
    versions: Array
    """int32"""
    temperature: float
    stop_reason: StopReason
    end_id: int | None
    """The stop token that ended the answer; None if it was cut off or met a stop text."""
    asked_at: float
    """Monotonic seconds."""
    answered_at: float = field(default_factory=time.monotonic)
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the weights behind each version."""
    reward: float | None = None
    """What the agent gave; None = nothing."""
    lost: bool = False
    """Its client went away before it had the answer, and has not asked again: no conversation continues it."""

    @property
    def truncated(self) -> bool:
        return self.stop_reason != "stop"
