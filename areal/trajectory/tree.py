"""The conversations of one session as a tree of completions, each prefix stored once.

Invariants: only finished answers are nodes; a parent's index is smaller than its children's; ids that were sampled are
never tokenised again. A node's `parent` is the conversation it continues, and credit flows along it; its ids continue
the parent's ids only where `extends` is True.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from areal.api.io_struct import ModelResponse
from areal.api.messages import Array
from areal.trajectory.answer import Answer
from areal.trajectory.completion import Completion, Prompt
from areal.trajectory.continuation import continue_ids
from areal.trajectory.meaning import Digest, Message, extend, prefix_digests
from areal.trajectory.renderer import Renderer, text_digest


class Tree:
    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.completions: list[Completion] = []
        self._by_path: dict[Digest, list[int]] = {}
        self._by_id: dict[str, int] = {}

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Prompt:
        """Place a conversation in the tree and turn it into ids. Leaves the tree as it is."""
        digests = list(prefix_digests(messages))
        found = self._find(messages, digests)
        if found is None:
            return self._new_branch(None, messages, digests[-1], self.renderer.render(messages, tools))
        parent, answer_at = found
        newer = messages[answer_at + 1 :]
        # What was recorded is rendered, not how the client spells it today: spelling must not move the past.
        whole = [*self.conversation(parent), *newer]
        text = self.renderer.render(whole, tools)
        new_ids = continue_ids(self.renderer, parent, whole, answer_at, tools, text)
        if new_ids is None:
            return self._new_branch(parent.index, newer, digests[-1], text)
        ids = [*self.token_ids(parent), *new_ids]
        return Prompt(ids, parent.index, True, new_ids, newer, digests[-1], len(text), text_digest(text))

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
            messages=prompt.messages,
            message=answer.message,
            text=answer.text,
            prompt_ids=np.asarray(prompt.new_ids, np.int32),
            output_ids=np.asarray(response.output_tokens, np.int32),
            logprobs=np.asarray(response.output_logprobs, np.float32),
            versions=np.asarray(response.output_versions, np.int32),
            temperature=temperature,
            stop_reason=response.stop_reason,
            end_id=answer.end_id,
            text_length=prompt.text_length,
            text_digest=prompt.text_digest,
            digests=response.digests,
        )
        self.completions.append(completion)
        self._by_id[completion.id] = completion.index
        self._by_path.setdefault(extend(prompt.path, answer.message, {}), []).append(completion.index)
        return completion

    def by_id(self, completion_id: str) -> Completion | None:
        index = self._by_id.get(completion_id)
        return None if index is None else self.completions[index]

    @property
    def last(self) -> Completion | None:
        """The completion that finished last; of several choices, the first, whose id the response bears."""
        return next((completion for completion in reversed(self.completions) if completion.choice == 0), None)

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
        path = [*self._ancestors(completion)][::-1]
        return [message for node in path for message in (*node.messages, node.message)]

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

    def _new_branch(self, parent: int | None, messages: list[Message], path: Digest, text: str) -> Prompt:
        ids = self.renderer.encode(text)
        return Prompt(ids, parent, False, ids, messages, path, len(text), text_digest(text))

    def _ancestors(self, completion: Completion) -> Iterator[Completion]:
        """The completion itself and all it continues, last to first."""
        node: Completion | None = completion
        while node is not None:
            yield node
            node = None if node.parent is None else self.completions[node.parent]

    def _find(self, messages: list[Message], digests: list[Digest]) -> tuple[Completion, int] | None:
        """The deepest completion whose conversation these messages begin with, and its answer's place in them."""
        for at in range(len(messages) - 1, -1, -1):
            indices = self._by_path.get(digests[at]) if messages[at]["role"] == "assistant" else None
            if indices:
                return self._choose([self.completions[index] for index in indices], messages), at
        return None

    def _choose(self, candidates: list[Completion], messages: list[Message]) -> Completion:
        """Of completions that mean the same, the one whose tool-call ids the client names, else the most recent."""
        if len(candidates) > 1:
            named = _call_ids(messages)
            for candidate in reversed(candidates):
                if _call_ids(self.conversation(candidate)) <= named:
                    return candidate
        return candidates[-1]


def _call_ids(messages: list[Message]) -> set[str]:
    return {call["id"] for message in messages for call in message.get("tool_calls", ())}
