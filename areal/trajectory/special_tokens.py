"""Which spellings a conversation may not use as tokens, and how text that holds one is encoded.

A chat template writes one text in which its own special tokens must become tokens, and those that a message merely
spells (`<|im_end|>` in a web page that an agent quotes) must stay text. So before it is rendered, every such spelling
is broken by a mark, a random number that no conversation contains. Rendered text with marks is encoded by a twin of the
tokenizer, which knows the special tokens under secret names only: what the template wrote is given those names, the
marks are removed, and everything else is text. What surrounds a spelling therefore keeps its tokens. Text without a
spelling has no mark and never meets the twin.

Reserved are the tokens that the tokenizer calls special and those with which the template begins and ends turns. Other
added tokens (`<think>` in many models) are part of what a text may say.
"""

import re
import secrets
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any

import orjson

from areal.trajectory.message import Image


class SpecialTokens:
    """The special tokens of one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Any, turn_ids: Collection[int] = ()) -> None:
        """`turn_ids`: tokens that mark turns, whether or not the tokenizer calls them special."""
        self._core: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._added: dict[int, Any] = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        self.special_ids = {*tokenizer.all_special_ids, *(n for n, token in self._added.items() if token.special)}
        """Those that the tokenizer calls special."""
        self._reserved = {
            number: token
            for number, token in self._added.items()
            if (number in self.special_ids or number in turn_ids) and _tells_itself_apart(token.content)
        }
        self.mark = _random_digits()
        """Inside a spelling it keeps the spelling from being a token. Digits, so that no template changes it."""
        self._names = {token.content: f"{_random_digits()}." for token in self._reserved.values()}
        self._openings = _openings(self._names)
        self._normalizer = None if self._core is None else self._core.normalizer
        if not any(token.normalized for token in self._reserved.values()):
            self._normalizer = None
        self._twin: Any = None

    def broken(self, value: Any) -> Any:
        """Messages, tools or any part of them, every spelling in it broken; the same object if it has none."""
        return self._broken(value) if self._may_spell(value) else value

    def plain(self, text: str) -> str:
        """The text as it was before spellings were broken."""
        return text.replace(self.mark, "")

    def after(self, text: str, beginning: str) -> str | None:
        """What follows the beginning, in which marks do not count; None if the text does not begin so."""
        if text.startswith(beginning):
            return text[len(beginning) :]
        if self.mark not in text or not self.plain(text).startswith(beginning):
            return None
        left, at = len(beginning), 0
        for piece in text.split(self.mark):
            if left <= len(piece):
                break
            left -= len(piece)
            at += len(piece) + len(self.mark)
        return text[at + left :].removeprefix(self.mark)

    def encode(self, text: str) -> list[int] | None:
        """The ids of text with marks; None if the tokenizer has no core of which a twin can be made."""
        if self._core is None:
            return None
        ids, forged = self._encode(text)
        if forged:  # a model may have the spelling among its pieces of ordinary text; it has no piece across a cut
            ids = [number for piece in text.split(self.mark) for number in self._encode(piece)[0]]
        return ids

    def _encode(self, text: str) -> tuple[list[int], bool]:
        """Its ids, and whether text became a reserved token anyway."""
        if self._twin is None:
            self._twin = self._make_twin()
        twin, known = self._twin
        named = self.plain(self._spelling.sub(lambda found: self._names[found[0]], text))
        encoding = twin.encode(named, add_special_tokens=False)
        pairs = list(zip(encoding.ids, encoding.tokens, strict=True))
        forged = any(number in self._reserved and token not in known for number, token in pairs)
        return [known.get(token, number) for number, token in pairs], forged

    def _make_twin(self) -> tuple[Any, dict[str, int]]:
        """The twin, which shares the vocabulary, and the ids of its added tokens in the tokenizer."""
        from tokenizers import AddedToken

        twin = type(self._core)(self._core.model)
        if self._core.normalizer is not None:
            twin.normalizer = self._core.normalizer
        if self._core.pre_tokenizer is not None:
            twin.pre_tokenizer = self._core.pre_tokenizer
        renamed = {
            number: AddedToken(self._names[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
            for number, token in self._reserved.items()
        }
        tokens = {**self._added, **renamed}
        twin.add_tokens(list(tokens.values()))
        return twin, {token.content: number for number, token in tokens.items()}

    def _may_spell(self, value: Any) -> bool:
        """A quick look, which may be wrong only by saying yes."""
        if value is None or not self._reserved:
            return False
        if self._normalizer is not None:
            return True
        try:
            written = orjson.dumps(value, default=_no_text)
        except TypeError:  # numbers beyond 64 bits, half of a surrogate pair, objects of a workflow
            return True
        return any(opening.search(written) for opening in self._openings)

    def _broken(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._broken_text(value)
        if isinstance(value, dict):
            return {self._broken(key): self._broken(part) for key, part in value.items()}
        return [self._broken(part) for part in value] if isinstance(value, list | tuple) else value

    def _broken_text(self, text: str) -> str:
        if self._spelling.search(text):
            return self._spelling_begin.sub(lambda found: found[0] + self.mark, text)
        if self._normalizer is not None and self._spelled_when_normal(text):
            return text[:1] + self.mark + text[1:]
        return text

    def _spelled_when_normal(self, text: str) -> bool:
        assert self._normalizer is not None
        normal = self._normalizer.normalize_str(text)
        return any(spelling in normal for spelling in self._normal_spellings)

    @cached_property
    def _normal_spellings(self) -> list[str]:
        assert self._normalizer is not None
        texts = [token.content for token in self._reserved.values() if token.normalized]
        return [*texts, *(normal for text in texts if (normal := self._normalizer.normalize_str(text).strip()))]

    @cached_property
    def _spelling(self) -> re.Pattern[str]:
        return re.compile(_any_of(self._names))

    @cached_property
    def _spelling_begin(self) -> re.Pattern[str]:
        """The first character of every spelling, also of one that begins inside another."""
        return re.compile(f"(?=(?:{_any_of(self._names)})).", re.DOTALL)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_twin": None}


def _tells_itself_apart(spelling: str) -> bool:
    """A token that is spelled as a character or a word means what that text means."""
    return len(spelling) > 1 and not spelling.isidentifier()


def _random_digits() -> str:
    return str(10**20 + secrets.randbelow(9 * 10**20))


def _openings(spellings: Iterable[str]) -> list[re.Pattern[bytes]]:
    """The first two bytes that a spelling has in JSON. A pattern for each first byte: one byte is found fastest."""
    seconds: dict[bytes, set[bytes]] = {}
    for spelling in spellings:
        written = orjson.dumps(spelling)[1:-1]
        seconds.setdefault(written[:1], set()).add(re.escape(written[1:2]))
    return [re.compile(re.escape(first) + b"[" + b"".join(sorted(found)) + b"]") for first, found in seconds.items()]


def _no_text(value: Any) -> None:
    """What the quick look sees of an image. Raises TypeError for other objects."""
    if not isinstance(value, Image):
        raise TypeError


def _any_of(words: Iterable[str]) -> str:
    """A pattern of these words that takes the longest, and looks at a character once however many words there are."""
    rests: dict[str, set[str]] = {}
    ends = False
    for word in words:
        if word:
            rests.setdefault(word[0], set()).add(word[1:])
        else:
            ends = True
    branches = [re.escape(first) + _any_of(following) for first, following in rests.items()]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{pattern})?" if ends else pattern
