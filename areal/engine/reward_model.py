"""A reward model as a reward function: `reward_fn: model:DIRECTORY`, or `RewardModel(DIRECTORY)` in a script.

The directory is what `RewardTrainer` saved, or any sequence classifier with one label. Answers that wait for their
scores while others are computed are scored together.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.api.errors import ModelError
from areal.engine.model.weights import has_value_head
from areal.engine.models import find_model, open_trainable
from areal.engine.training.engine import ScoringEngine
from areal.engine.training.pairs import Messages, ends_of_conversations
from areal.utils.background import in_thread
from areal.utils.hf_utils import load_hf_tokenizer

MAX_BATCH = 64
"""Answers that are scored together."""

Conversation = tuple[Messages, Any]
"""Messages that end with the assistant's, and tools."""


class RewardModel:
    """`await model(prompt, completion, prompt_ids, completion_ids, messages=…)` is the score of the completion.

    The model is read when this is made; a copy that travels to another process reads it there.
    """

    def __init__(self, path: str | Path, *, device: str = "auto", max_tokens_per_mb: int = 16384) -> None:
        self.path = str(path)
        self._settings = {"device": device, "max_tokens_per_mb": max_tokens_per_mb}
        directory = find_model(self.path)
        if not has_value_head(directory):
            raise ModelError(
                f"a reward model has a head that gives one score, {self.path!r} has none; train it with RewardTrainer"
            )
        self._tokenizer = load_hf_tokenizer(directory)
        model = open_trainable(directory, device=device, frozen=True, value_head=True)
        self._engine = ScoringEngine(model, max_tokens_per_mb=max_tokens_per_mb)
        self._waiting: list[tuple[Conversation, asyncio.Future[float]]] = []
        self._working: asyncio.Task[None] | None = None

    def __reduce__(self) -> Any:
        return _remade, (type(self), self.path, self._settings)

    async def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        *,
        messages: Messages,
        tools: Any = None,
        **task: Any,
    ) -> float:
        return await self.score([*messages, {"role": "assistant", "content": completion}], tools)

    async def score(self, messages: Messages, tools: Any = None) -> float:
        """Of a conversation that ends with the assistant's turn."""
        score: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(((messages, tools), score))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await score

    def scores(self, conversations: Sequence[Conversation]) -> list[float]:
        """Of several."""
        found: list[float] = self._engine.values(ends_of_conversations(conversations, self._tokenizer)).tolist()
        return found

    async def _work(self) -> None:
        """Until nobody waits."""
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            found = await in_thread(self._each, [conversation for conversation, _ in batch])
            for (_, waiting), score in zip(batch, found, strict=True):
                if waiting.done():  # its caller was cancelled
                    continue
                if isinstance(score, Exception):
                    waiting.set_exception(score)
                else:
                    waiting.set_result(score)

    def _each(self, conversations: Sequence[Conversation]) -> "Sequence[float | Exception]":
        """A conversation that cannot be scored fails alone."""
        try:
            return self.scores(conversations)
        except Exception as error:  # whatever a template raises at one of them
            if len(conversations) == 1:
                return [error]
            return [score for each in conversations for score in self._each([each])]


def _remade(kind: type[RewardModel], path: str, settings: dict[str, Any]) -> RewardModel:
    return kind(path, **settings)
