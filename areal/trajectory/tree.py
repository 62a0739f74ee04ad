"""The conversations of one session as a tree of completions, each prefix stored once.

A call is placed in the tree in three steps: `draft` finds the recorded completion that its conversation continues and
renders what is new, `encode` turns that into ids, `settle` puts them after the ids of the parent. `add` records the
answer as a node.

Invariants: only finished answers are nodes; a parent's index is smaller than its children's; ids that were sampled are
never tokenised again. A node's `parent` is the conversation it continues, and credit flows along it; its ids continue
the parent's ids only where `extends` is True: a template may render an earlier turn differently later on (drop its
thinking, say), and so rewrite the past.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from areal.api.errors import RequestError
from areal.api.io_struct import Choices, ModelResponse, StopReason, TokenIds, add_digests
from areal.api.messages import Array
from areal.trajectory.answer import Answer
from areal.trajectory.matching import Conversation, ConversationCache, normalised
from areal.trajectory.message import EMPTY, Digest, Image, Message, call_ids, extend_digest, images_in, same_words
from areal.trajectory.parsers.base import Tools
from areal.trajectory.rendering import Renderer


@dataclass(slots=True)
class Completion:
    """A finished answer: a node that holds only what its parent does not.

    Arrays are 1-D and, except `prompt_ids`, as long as the answer.
    """

    id: str
    index: int
    """Place in the tree, in order of finishing."""
    choice: int
    """Which of the `n` answers to one request."""
    parent: int | None
    extends: bool
    depth: int
    """Completions from the beginning of the conversation, itself counted."""
    messages: list[Message]
    """The conversation after the parent's answer, up to this one."""
    message: Message
    """The answer as the client got it."""
    text: str
    """The sampled text without its end token: the message before thinking and tool calls were read out of it."""
    tools: Tools | None
    """Shared with every completion that was offered the same."""
    thinking: bool
    """The prompt ended inside thinking."""
    prompt_ids: Array
    """int32: the prompt's ids beyond the parent's, or all of them if `extends` is False."""
    images: list[Image]
    """Those whose places are in `prompt_ids`."""
    output_ids: Array
    """int32"""
    logprobs: Array
    """float32: of the distribution that each was drawn from."""
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
    """Weight version -> digest of those weights."""
    choices: Choices | None = None
    """From which tokens they were drawn; None = each from the whole vocabulary."""
    reward: float | None = None
    """What the agent gave; None = nothing."""
    lost: bool = False
    """Its client went away before it received the answer, and has not asked again: no conversation continues it."""

    @property
    def truncated(self) -> bool:
        return self.stop_reason != "stop"

    @property
    def finish_reason(self) -> str:
        """Why it ended, as Chat Completions says it."""
        if self.truncated:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


@dataclass(slots=True)
class Draft:
    """A call placed in the tree, its new text not encoded yet."""

    parent: Completion | None
    """The completion whose conversation this one continues."""
    extends: bool
    """The text follows the parent's ids; False where the conversation goes on but the template rewrote its past."""
    text: str
    images: list[Image]
    """Those whose places are in the text, in order."""
    messages: list[Message]
    """What comes after the parent's answer."""
    conversation: Digest
    tools: Tools | None
    """What the model may call; None = nothing is a call."""
    thinking: bool
    """The text ends inside thinking, so the answer begins with it."""


@dataclass(slots=True)
class Prompt:
    """A call placed in the tree, and the token ids that the engine is asked to continue."""

    ids: TokenIds
    parent: int | None
    """Index of the completion whose conversation this one continues."""
    extends: bool
    """The ids begin with the parent's; False where the conversation goes on but the template rewrote its past."""
    new_ids: list[int]
    """What comes after the parent's ids; all ids if this prompt does not extend them."""
    messages: list[Message]
    """What comes after the parent's answer."""
    conversation: Digest
    tools: Tools | None
    """What the model may call; None = nothing is a call."""
    thinking: bool
    """The prompt ends inside thinking, so the answer begins with it."""
    hash: blake2b
    """Of the ids."""
    images: list[Image] = field(default_factory=list)
    """Those whose places are in the ids, in order."""
    new_images: list[Image] = field(default_factory=list)
    """Those whose places are in the new ids."""
    asked_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Latest:
    """The conversation that went on last, in one piece: its next turn then costs what is new of it."""

    index: int
    """Of the completion that it ends with."""
    messages: list[Message]
    ids: list[int]
    """All of them, which the next turn appends to. A plain list: Python copies it twice as fast as a TokenIds."""
    hash: blake2b
    """Of all ids."""


class Tree:
    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.completions: list[Completion] = []
        self._by_conversation: dict[Digest, list[int]] = {}
        self._by_id: dict[str, int] = {}
        self._conversations = ConversationCache()
        self._latest: _Latest | None = None
        self._tools: list[Tools] = []

    def prompt(self, messages: list[Message], tools: Tools | None = None) -> Prompt:
        """Place a conversation in the tree and turn it into ids. Records nothing."""
        draft = self.draft(messages, tools)
        return self.settle(draft, self.encode(draft))

    def draft(
        self,
        messages: list[Message],
        tools: Tools | None = None,
        conversations: ConversationCache | None = None,
        thinks: bool | None = None,
    ) -> Draft:
        """The first step of `prompt`. It may run in a thread, while answers are added, if it gets a cache of its own;
        `remember` that afterwards. `thinks` as in `Renderer.render`."""
        tools = self._shared(tools)
        cache = self._conversations if conversations is None else conversations
        sent = cache.read(messages, lambda message: normalised(message, self.renderer.format, tools))
        found = self._find_parent(sent)
        if found is None:
            text = self.renderer.render(messages, tools, thinks)
            return self._draft(None, text, images_in(messages), messages, sent.digest, tools)
        parent, answer_at = found
        if messages[answer_at] == parent.message:
            sent.messages[answer_at] = messages[answer_at] = parent.message  # held once, also by who keeps `messages`
        newer = messages[answer_at + 1 :]
        # What was recorded is rendered, not how the client spells it today: spelling must not change the past.
        before = self.conversation(parent)
        before.pop()  # the answer itself
        try:
            added = self.renderer.added_text(parent, before, newer, tools, thinks)
            if added is not None:
                return self._draft(parent, added, images_in(newer), newer, sent.digest, tools, extends=True)
            text = self.renderer.render([*before, parent.message, *newer], tools, thinks)
        except RequestError:  # calls that the client sends as text may not fit a template that gets them as calls
            text = self.renderer.render(messages, tools, thinks)
        return self._draft(parent, text, images_in([*before, *newer]), newer, sent.digest, tools)

    def raw_draft(self, text: str) -> Draft:
        """A prompt that is no conversation: no call of another kind continues it."""
        messages: list[Message] = [{"role": "prompt", "content": text}]
        return self._draft(None, text, [], messages, extend_digest(EMPTY, messages[0], {}), None)

    def unread(self, messages: list[Message]) -> list[Message]:
        """Those that no earlier call has sent in the same place: what `draft` has to read."""
        return messages[self._conversations.known_length(messages) :]

    def remember(self, conversations: ConversationCache) -> None:
        """What a draft in a thread has read need not be read again."""
        self._conversations.take(conversations)

    def encode(self, draft: Draft, positions: int | None = None) -> list[int]:
        """The second step: the ids of the text. Reads nothing that changes, so it may run in a thread.

        `positions` = how many tokens the model takes; text that cannot fit is refused: ContextLengthError.
        """
        if draft.parent is None or not draft.extends:
            return self.renderer.encode(draft.text, draft.images, positions)
        return self.renderer.added_ids(draft.parent, draft.text, draft.images, positions)

    def settle(self, draft: Draft, new_ids: list[int]) -> Prompt:
        """The last step."""
        parent = draft.parent
        ids, hashed, images = TokenIds(), None, draft.images
        if parent is not None and draft.extends:
            latest = self._path_to(parent)
            hashed = latest.hash
            ids += latest.ids  # not TokenIds(…), which leaves no room for the rest
            if self.renderer.image_processor is not None:
                images = [image for node in self.token_path(parent) for image in node.images] + images
        ids += new_ids
        return Prompt(
            ids=ids,
            hash=prompt_hash(new_ids, hashed),
            parent=None if parent is None else parent.index,
            extends=draft.extends,
            new_ids=new_ids,
            messages=draft.messages,
            conversation=draft.conversation,
            tools=draft.tools,
            thinking=draft.thinking,
            images=images,
            new_images=draft.images,
        )

    def add(
        self,
        prompt: Prompt,
        response: ModelResponse,
        answer: Answer,
        *,
        completion_id: str,
        temperature: float,
        choice: int = 0,
    ) -> Completion:
        """Record a finished answer."""
        completion = Completion(
            id=completion_id,
            index=len(self.completions),
            choice=choice,
            parent=prompt.parent,
            extends=prompt.extends,
            depth=1 if prompt.parent is None else self.completions[prompt.parent].depth + 1,
            messages=prompt.messages,
            message=answer.message,
            text=answer.text,
            tools=prompt.tools,
            thinking=prompt.thinking,
            prompt_ids=np.asarray(prompt.new_ids, np.int32),
            images=prompt.new_images,
            output_ids=np.asarray(response.output_tokens, np.int32),
            logprobs=np.asarray(response.output_logprobs, np.float32),
            versions=np.asarray(response.output_versions, np.int32),
            temperature=temperature,
            stop_reason=response.stop_reason,
            end_id=answer.end_id,
            asked_at=prompt.asked_at,
            digests=response.digests,
            choices=response.choices,
        )
        self._go_on(prompt, completion, response.output_tokens)
        self.completions.append(completion)
        self._by_id[completion.id] = completion.index
        normal = normalised(answer.message, self.renderer.format, prompt.tools)
        self._by_conversation.setdefault(extend_digest(prompt.conversation, normal, {}), []).append(completion.index)
        return completion

    def by_id(self, completion_id: str) -> Completion | None:
        index = self._by_id.get(completion_id)
        return None if index is None else self.completions[index]

    @property
    def last(self) -> Completion | None:
        """The completion that finished last; of several choices, the first, whose id the response has."""
        received = (node for node in reversed(self.completions) if node.choice == 0 and not node.lost)
        return next(received, None)

    @property
    def rewrites(self) -> int:
        """Times a conversation went on but its template rewrote the past, so that a new branch began."""
        return sum(node.parent is not None and not node.extends and node.choice == 0 for node in self.completions)

    @property
    def reward(self) -> float:
        """Sum of the raw rewards given."""
        return sum(completion.reward or 0.0 for completion in self.completions)

    @property
    def digests(self) -> dict[int, str]:
        """Weight version -> digest of those weights, for every version that produced a token here."""
        digests: dict[int, str] = {}
        for completion in self.completions:
            add_digests(digests, completion.digests)
        return digests

    def path(self, completion: Completion) -> list[Completion]:
        """The completions of its conversation, first to last."""
        path = [completion]
        while (parent := path[-1].parent) is not None:
            path.append(self.completions[parent])
        return path[::-1]

    def conversation(self, completion: Completion) -> list[Message]:
        """Every message from the beginning to this answer."""
        latest = self._latest
        if latest is not None and latest.index == completion.index:
            return list(latest.messages)
        messages: list[Message] = []
        for node in self.path(completion):
            messages += node.messages
            messages.append(node.message)
        return messages

    def token_path(self, completion: Completion) -> list[Completion]:
        """The completions whose ids make up this one's, first to last."""
        path = [completion]
        while path[-1].extends and path[-1].parent is not None:
            path.append(self.completions[path[-1].parent])
        return path[::-1]

    def token_ids(self, completion: Completion) -> list[int]:
        """Every id from the beginning to the end of this answer."""
        parts: list[Array] = []
        for node in self.token_path(completion):
            parts += (node.prompt_ids, node.output_ids)
        ids: list[int] = np.concatenate(parts).tolist()
        return ids

    def forget_lost(self) -> None:
        """Remove answers that no client received, once no client can ask for them again."""
        inner = {node.parent for node in self.completions}
        kept = [node for node in self.completions if not node.lost or node.index in inner]
        if len(kept) == len(self.completions):
            return
        places: dict[int | None, int | None] = {None: None} | {node.index: at for at, node in enumerate(kept)}
        self._by_conversation = {
            conversation: [at for index in indices if (at := places.get(index)) is not None]
            for conversation, indices in self._by_conversation.items()
        }
        for at, node in enumerate(kept):
            node.index, node.parent = at, places[node.parent]
        self.completions, self._latest = kept, None
        self._by_id = {node.id: node.index for node in kept}

    def _draft(
        self,
        parent: Completion | None,
        text: str,
        images: list[Image],
        messages: list[Message],
        conversation: Digest,
        tools: Tools | None,
        *,
        extends: bool = False,
    ) -> Draft:
        thinking = self.renderer.opens_thinking(text)
        return Draft(parent, extends, text, images, messages, conversation, tools, thinking)

    def _path_to(self, completion: Completion) -> _Latest:
        latest = self._latest
        if latest is not None and latest.index == completion.index:
            return latest
        ids = self.token_ids(completion)
        return _Latest(completion.index, self.conversation(completion), ids, prompt_hash(ids))

    def _go_on(self, prompt: Prompt, answer: Completion, output: list[int]) -> None:
        """The conversation with this answer is the latest now."""
        messages = [] if prompt.parent is None else self.conversation(self.completions[prompt.parent])
        messages += prompt.messages
        messages.append(answer.message)
        latest = self._latest
        if latest is not None and latest.index == prompt.parent and prompt.extends:
            ids = latest.ids
            ids += prompt.new_ids
        else:
            ids = prompt.ids[:]
        ids += output
        self._latest = _Latest(answer.index, messages, ids, prompt_hash(output, prompt.hash))

    def _shared(self, tools: Tools | None) -> Tools | None:
        """Equal tools as one object: they are sent with every call, and stored once."""
        if tools is None:
            return None
        for known in self._tools:
            if known == tools:
                return known
        self._tools.append(tools)
        return tools

    def _find_parent(self, sent: Conversation) -> tuple[Completion, int] | None:
        """The deepest completion that this conversation certainly continues, and its answer's place in the messages."""
        for place in range(len(sent.messages) - 1, -1, -1):
            if sent.messages[place]["role"] == "assistant":
                recorded = map(self.completions.__getitem__, self._by_conversation.get(sent.digests[place], ()))
                candidates = [node for node in recorded if not node.lost]
                chosen = self._choose(candidates, sent) if candidates else None
                if chosen is not None:
                    return chosen, place
        return None

    def _choose(self, candidates: list[Completion], sent: Conversation) -> Completion | None:
        """Of completions with equal conversations, the one that was sent; None if none fits, or several alike.

        Thinking that was sent back and tool-call ids tell them apart. If nothing does and all are the same tokens, it
        makes no difference to what is trained, and the most recent is taken.
        """
        if sent.reasoning:
            candidates = [candidate for candidate in candidates if self._has_reasoning(candidate, sent.reasoning)]
        if len(candidates) > 1:
            named = [candidate for candidate in candidates if self._call_ids(candidate) <= sent.call_ids.keys()]
            candidates = named or candidates
        if not candidates or not all(self._same_tokens(candidates[-1], other) for other in candidates[:-1]):
            return None
        return candidates[-1]

    def _has_reasoning(self, candidate: Completion, reasoning: dict[int, str]) -> bool:
        recorded = self.conversation(candidate)
        return all(
            same_words(thought, recorded[place].get("reasoning_content", ""))
            for place, thought in reasoning.items()
            if place < len(recorded)
        )

    def _call_ids(self, candidate: Completion) -> set[str]:
        return {call_id for message in self.conversation(candidate) for call_id in call_ids(message)}

    def _same_tokens(self, one: Completion, other: Completion) -> bool:
        """Whether two completions are the same tokens after the same tokens."""
        while one is not other:
            same_prompt = one.extends == other.extends and one.prompt_ids.tobytes() == other.prompt_ids.tobytes()
            if not same_prompt or one.output_ids.tobytes() != other.output_ids.tobytes():
                return False
            if one.parent is None or other.parent is None:
                return one.parent == other.parent
            one, other = self.completions[one.parent], self.completions[other.parent]
        return True


def prompt_hash(ids: Sequence[int], beginning: blake2b | None = None) -> blake2b:
    """Of these ids, after those whose hash is `beginning`."""
    hashed = blake2b(digest_size=16) if beginning is None else beginning.copy()
    hashed.update(array("q", ids))
    return hashed
