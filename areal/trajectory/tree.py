"""The conversations of one session as a tree of completions, each prefix stored once.

Invariants: only finished answers are nodes; a parent's index is smaller than its children's; ids that were sampled are
never tokenised again. A node's `parent` is the conversation it continues, and credit flows along it; its ids continue
the parent's ids only where `extends` is True.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal.api.errors import RequestError
from areal.api.io_struct import ModelResponse
from areal.api.messages import Array
from areal.trajectory.answer import Answer
from areal.trajectory.completion import Completion, Draft, Prompt
from areal.trajectory.matching import Lines, meant, recognise
from areal.trajectory.message import Digest, Message, Picture, extend, pictures_in
from areal.trajectory.rendering import Renderer, Tools, newer_ids, newer_text


class Tree:
    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.completions: list[Completion] = []
        self._by_path: dict[Digest, list[int]] = {}
        self._by_id: dict[str, int] = {}
        self._lines = Lines()
        self._tools: list[list[dict[str, Any]]] = []

    def prompt(self, messages: list[Message], tools: Tools = None) -> Prompt:
        """Place a conversation in the tree and turn it into ids. Records nothing."""
        draft = self.draft(messages, tools)
        return self.settle(draft, self.encode(draft))

    def draft(self, messages: list[Message], tools: Tools = None) -> Draft:
        """The first step of `prompt`."""
        tools = self._shared(tools)
        line = self._lines.read(messages, lambda message: meant(message, self.renderer.format, tools))
        found = recognise(self, line)
        if found is None:
            text = self.renderer.render(messages, tools)
            return self._draft(None, text, pictures_in(messages), messages, line.path, tools)
        parent, answer_at = found
        if messages[answer_at] == parent.message:
            line.messages[answer_at] = parent.message  # held once
        newer = messages[answer_at + 1 :]
        # What was recorded is rendered, not how the client spells it today: spelling must not move the past.
        before = self.conversation(parent)[:-1]
        try:
            behind = newer_text(self.renderer, parent, before, newer, tools)
            if behind is not None:
                return self._draft(parent, behind, pictures_in(newer), newer, line.path, tools, extends=True)
            text = self.renderer.render([*before, parent.message, *newer], tools)
        except RequestError:  # calls that the client spells as text may fit no template that has them as calls
            text = self.renderer.render(messages, tools)
        return self._draft(parent, text, pictures_in([*before, *newer]), newer, line.path, tools)

    def encode(self, draft: Draft) -> list[int]:
        """The second step: the ids of the text. Reads nothing that changes, so it may run in a thread."""
        if draft.parent is None or not draft.extends:
            return self.renderer.encode(draft.text, draft.pictures)
        return newer_ids(self.renderer, draft.parent, draft.text, draft.pictures)

    def settle(self, draft: Draft, new_ids: list[int]) -> Prompt:
        """The last step."""
        parent = draft.parent
        ids, pictures = new_ids, draft.pictures
        if parent is not None and draft.extends:
            ids = self.token_ids(parent, new_ids)
            pictures = [picture for node in self.token_path(parent) for picture in node.pictures] + pictures
        return Prompt(
            ids=ids,
            parent=None if parent is None else parent.index,
            extends=draft.extends,
            new_ids=new_ids,
            messages=draft.messages,
            path=draft.path,
            tools=draft.tools,
            thinking=draft.thinking,
            pictures=pictures,
            new_pictures=draft.pictures,
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
            pictures=prompt.new_pictures,
            output_ids=np.asarray(response.output_tokens, np.int32),
            logprobs=np.asarray(response.output_logprobs, np.float32),
            versions=np.asarray(response.output_versions, np.int32),
            temperature=temperature,
            stop_reason=response.stop_reason,
            end_id=answer.end_id,
            asked_at=prompt.asked_at,
            digests=response.digests,
        )
        self.completions.append(completion)
        self._by_id[completion.id] = completion.index
        said = meant(answer.message, self.renderer.format, prompt.tools)
        self._by_path.setdefault(extend(prompt.path, said, {}), []).append(completion.index)
        return completion

    def by_id(self, completion_id: str) -> Completion | None:
        index = self._by_id.get(completion_id)
        return None if index is None else self.completions[index]

    def by_path(self, path: Digest) -> list[Completion]:
        """The completions whose conversations mean this, in order of finishing."""
        found = [self.completions[index] for index in self._by_path.get(path, ())]
        return [completion for completion in found if not completion.lost]

    @property
    def last(self) -> Completion | None:
        """The completion that finished last; of several choices, the first, whose id the response bears."""
        heard = (node for node in reversed(self.completions) if node.choice == 0 and not node.lost)
        return next(heard, None)

    def forget_lost(self) -> None:
        """Leave out what nobody heard, when nobody can ask for it any more."""
        inner = {node.parent for node in self.completions}
        kept = [node for node in self.completions if not node.lost or node.index in inner]
        if len(kept) == len(self.completions):
            return
        places: dict[int | None, int | None] = {None: None} | {node.index: at for at, node in enumerate(kept)}
        self._by_path = {
            path: [at for index in indices if (at := places.get(index)) is not None]
            for path, indices in self._by_path.items()
        }
        for at, node in enumerate(kept):
            node.index, node.parent = at, places[node.parent]
        self.completions = kept
        self._by_id = {node.id: node.index for node in kept}

    @property
    def rewrites(self) -> int:
        """Times a conversation went on but its template wrote the past anew, so that a new branch began."""
        return sum(node.parent is not None and not node.extends and node.choice == 0 for node in self.completions)

    @property
    def reward(self) -> float:
        """Sum of the raw rewards given."""
        return sum(completion.reward or 0.0 for completion in self.completions)

    @property
    def digests(self) -> dict[int, str]:
        """Digest of the weights behind each version that produced a token here."""
        return {version: digest for completion in self.completions for version, digest in completion.digests.items()}

    def conversation(self, completion: Completion) -> list[Message]:
        """Every message from the beginning to this answer."""
        path = [completion]
        while (parent := path[-1].parent) is not None:
            path.append(self.completions[parent])
        messages: list[Message] = []
        for node in reversed(path):
            messages += node.messages
            messages.append(node.message)
        return messages

    def token_path(self, completion: Completion) -> list[Completion]:
        """The completions whose ids make up this one's, first to last."""
        path = [completion]
        while path[-1].extends and path[-1].parent is not None:
            path.append(self.completions[path[-1].parent])
        return path[::-1]

    def token_ids(self, completion: Completion, newer: Sequence[int] = ()) -> list[int]:
        """Every id from the beginning to the end of this answer, and the newer ones."""
        parts: list[Array] = []
        for node in self.token_path(completion):
            parts += (node.prompt_ids, node.output_ids)
        ids: list[int] = np.concatenate([*parts, np.asarray(newer, np.int32)]).tolist()
        return ids

    def _draft(
        self,
        parent: Completion | None,
        text: str,
        pictures: list[Picture],
        messages: list[Message],
        path: Digest,
        tools: Tools,
        *,
        extends: bool = False,
    ) -> Draft:
        thinking = self.renderer.opens_thinking(text)
        return Draft(parent, extends, text, pictures, messages, path, tools, thinking)

    def _shared(self, tools: Tools) -> Tools:
        """Equal tools as one object: they are sent with every call, and stored once."""
        if tools is None:
            return None
        for known in self._tools:
            if known == tools:
                return known
        self._tools.append(tools)
        return tools
