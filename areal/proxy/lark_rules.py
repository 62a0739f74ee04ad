"""The pieces of a grammar in llguidance's variant of Lark's syntax, for one tokenizer's added tokens."""

import json
import re
from collections.abc import Mapping

TEXT = "TEXT: /(?s:.+)/"
"""Anything but an added token; those are never part of text."""


class LarkRules:
    """Rules of one grammar, in the order they were added."""

    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        """`added_tokens`: tokens that stand outside the tokenizer's vocabulary of text, by their text."""
        self._tokens = added_tokens
        names = sorted(added_tokens, key=len, reverse=True)
        self._splitter = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []

    def add(self, name: str, body: str) -> str:
        """A rule by that name; returns the name."""
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text, its added tokens as themselves."""
        pieces: list[str] = []
        end = 0
        for found in self._splitter.finditer(text) if self._splitter else ():
            pieces += [_quote(text[end : found.start()]), f"<[{self._tokens[found[0]]}]>"]
            end = found.end()
        return " ".join(piece for piece in (*pieces, _quote(text[end:])) if piece)

    def until(self, name: str, mark: str) -> str:
        """Any text, and behind it the first `mark`, be it a token of its own or spelled out."""
        self._rules.append(f"{name}_spelled[suffix={json.dumps(mark)}]: /(?s:.*)/")
        if mark not in self._tokens:
            return f"{name}_spelled"
        return self.add(name, f"TEXT? {self.literal(mark)} | {name}_spelled")

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, TEXT])


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
