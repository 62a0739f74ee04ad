"""An agent that answers questions from documents: it searches, reads, searches again, and cites what it found.

The documents are in an SQLite index with full-text search. The model has one tool, `search`, and answers in words, with
the number of each document that the answer follows from: `Oslo [417] [236]`.
"""

import json
import re
import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from areal.api.errors import WorkflowError
from areal.api.workflow_api import AgentWorkflow
from areal.config.errors import require
from areal.workflow.math_task import MODEL, openai_client
from examples.search_agent.corpus import Document, documents

RESULTS = 2
"""Documents that a search shows."""
NOTHING = "nothing found"
UNCITED = 0.2
"""The reward of a right answer whose citations are not its evidence."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the documents.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    }
]
CREATE = """CREATE VIRTUAL TABLE documents USING fts5(text, tokenize="porter unicode61 tokenchars '-'")"""
"""Names have hyphens, and are words as a whole."""
_CITATION = re.compile(r"\[(\d{1,9})\]")
_WORD = re.compile(r"[\w-]+")


class SearchIndex:
    """Documents in memory, found by their words."""

    def __init__(self, texts: Collection[Document]) -> None:
        # Episodes may run in another thread than the one that made the agent; a search only reads.
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._database.execute(CREATE)
        except sqlite3.OperationalError as error:
            raise WorkflowError(f"this Python's SQLite has no full-text search ({error}); use one with FTS5") from error
        rows = [(document.number, document.text) for document in texts]
        self._database.executemany("INSERT INTO documents(rowid, text) VALUES (?, ?)", rows)

    def search(self, query: str, limit: int = RESULTS) -> list[Document]:
        """The documents that share the most and rarest words with the query, best first."""
        # In quotes, or a query of the model might be an expression of SQLite's own, or none.
        words = " OR ".join(f'"{word}"' for word in _WORD.findall(query))
        if not words:
            return []
        found = self._database.execute(
            "SELECT rowid, text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?", (words, limit)
        )
        return [Document(number, text) for number, text in found]


@dataclass(frozen=True)
class Answer:
    """What the model said in the end, taken apart."""

    words: str
    citations: frozenset[int]

    @classmethod
    def read(cls, text: str) -> "Answer":
        """Words and `[number]`s, in any order."""
        words = " ".join(_CITATION.sub(" ", text).split())
        return cls(words.rstrip("."), frozenset(int(number) for number in _CITATION.findall(text)))


def score(text: str, seen: Collection[int], answer: str, evidence: Collection[int]) -> float:
    """1 for a right answer that cites its evidence and nothing else, all of it seen in this episode."""
    given = Answer.read(text)
    if given.words != answer:
        return 0.0
    return 1.0 if given.citations == set(evidence) and given.citations <= set(seen) else UNCITED


def query_of(arguments: str) -> str | None:
    """What a call asks to search for; None = it is not a call of this tool."""
    try:
        asked = json.loads(arguments)
    except (ValueError, RecursionError):  # a number may have too many digits, and brackets may be nested too deeply
        return None
    query = asked.get("query") if isinstance(asked, dict) else None
    return query if isinstance(query, str) else None


class SearchAgent(AgentWorkflow):
    """Plays one question; a call that is no search, or no answer within `max_turns` calls, is a wrong answer."""

    def __init__(self, max_turns: int = 4) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns

    @cached_property
    def index(self) -> SearchIndex:
        return SearchIndex(documents())

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = openai_client(extra_kwargs)
        messages: list[Any] = list(data["messages"])
        seen: set[int] = set()
        for _ in range(self.max_turns):
            response = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
            said = response.choices[0].message
            if not said.tool_calls:
                return score(said.content or "", seen, data["answer"], data["evidence"])
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                query = query_of(call.function.arguments) if call.function.name == "search" else None
                if query is None:
                    return 0.0
                found = self.index.search(query)
                seen.update(document.number for document in found)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": shown(found)})
        return 0.0


def shown(found: Collection[Document]) -> str:
    """A line for each document, as the model reads it."""
    return "\n".join(f"[{document.number}] {document.text}" for document in found) or NOTHING
