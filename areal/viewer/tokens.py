"""The tokens of an episode as a page shows them: their text, what is known of each, and where branches part.

Text comes from the tokenizer that the run's checkpoint or its config names, read without torch; ids stand in for it
where there is none. A token is decoded by itself: one that is part of a character shows the bytes that it stands for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.messages import Array, Episode, Row, TrainedRow
from areal.store.search import StoreSearch
from areal.utils.hf_utils import tokenizer_directory
from areal.viewer.html import visible

TOKENIZER_FILE = "tokenizer.json"
MOST_TOKENS = 20_000
"""On one page."""
AROUND = 8
"""Tokens that are shown on either side of a fork."""
DIGITS = 5


class TokenTexts:
    """What the ids of a run stand for."""

    def __init__(self, tokenizer: Any = None) -> None:
        """None = nobody knows."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._anchor: list[int] = []
        self._before = ""
        if tokenizer is not None:  # some decoders drop a space at the beginning, so every token gets one before it
            self._anchor = list(tokenizer.encode("a", add_special_tokens=False).ids)[-1:]
            self._before = tokenizer.decode(self._anchor, skip_special_tokens=False)

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def of(self, ids: Sequence[int]) -> list[str]:
        for number in {int(each) for each in ids} - self._texts.keys():
            self._texts[number] = self._text(number)
        return [self._texts[int(each)] for each in ids]

    def _text(self, number: int) -> str:
        if self._tokenizer is None:
            return f"{number} "
        text = self._tokenizer.decode([*self._anchor, number], skip_special_tokens=False)
        own = text.removeprefix(self._before)
        if "�" in own or not own:  # part of a character, or nothing that text shows
            own = _as_bytes(self._tokenizer.id_to_token(number) or "") or f"⟨{number}⟩"
        return visible(own)


def _as_bytes(token: str) -> str:
    """What stands for bytes in a byte-level vocabulary as these bytes: `⟨f0 9f⟩`; any other token as it is."""
    found = [_BYTES.get(each) for each in token]
    known = [each for each in found if each is not None]
    return f"⟨{bytes(known).hex(' ')}⟩" if known and len(known) == len(found) else token


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as themselves, and the others as characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def load_texts(directory: Path, config: dict[str, Any]) -> TokenTexts:
    """`config` is the run's, as its store has it."""
    from tokenizers import Tokenizer  # it takes a moment, and only pages with tokens need it

    for path in _candidates(directory, config):
        if path.is_file():
            try:
                return TokenTexts(Tokenizer.from_file(str(path)))
            except Exception:  # the library raises plain ones; ids are shown instead
                continue
    return TokenTexts()


def _candidates(directory: Path, config: dict[str, Any]) -> list[Path]:
    """The run's own copy first: a model's directory may have changed since."""
    checkpoints = sorted((directory / "checkpoints").glob(f"step-*/{TOKENIZER_FILE}"), reverse=True)
    named = str(config.get("tokenizer_path") or (config.get("actor") or {}).get("path") or "")
    if not named:
        return checkpoints
    try:
        place = Path(tokenizer_directory(named))
    except ValueError:  # a built-in model that there is no more
        return checkpoints
    return [*checkpoints, (place / TOKENIZER_FILE).expanduser(), *_downloaded(named)]


def _downloaded(model: str) -> list[Path]:
    """What the model hub's cache on this machine has; nothing is downloaded."""
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        return []
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, TOKENIZER_FILE)
    return [Path(found)] if isinstance(found, str) else []


def token_columns(row: Row, trained: TrainedRow | None, texts: TokenTexts, first: int = 0) -> dict[str, Any]:
    """A row as lists that a script colours: `text` and `id` of all tokens, numbers of the sampled ones.

    `at` are the places of sampled tokens among those that are shown; numbers that nobody knows are None.
    """
    part = slice(first, first + MOST_TOKENS)
    sampled = row.completion_index[part] >= 0
    at = np.flatnonzero(sampled)
    columns = {
        "logprob": row.logprobs[part][sampled],
        "returns": row.returns[part][sampled],
        "trainer": _at_mask(row, None if trained is None else trained.logprobs)[part][sampled],
        "advantage": _at_mask(row, None if trained is None else trained.advantages)[part][sampled],
        "entropy": _at_mask(row, None if trained is None else trained.entropies)[part][sampled],
    }
    return {
        "first": first,
        "total": len(row.input_ids),
        "id": row.input_ids[part].tolist(),
        "text": texts.of(row.input_ids[part].tolist()),
        "at": at.tolist(),
        "trained": row.loss_mask[part][sampled].tolist(),
        "version": row.versions[part][sampled].tolist(),
        "completion": row.completion_index[part][sampled].tolist(),
        "left": [each for each, own in zip(_left(row)[part], sampled.tolist(), strict=True) if own],
        **{name: _rounded(values) for name, values in columns.items()},
    }


def _left(row: Row) -> list[str | None]:
    """What each token was drawn from, in words; None = from the whole vocabulary, or it was not drawn."""
    left: list[str | None] = [None] * len(row.input_ids)
    for each in row.choices:
        count = each.end - each.begin
        if each.sizes is not None:
            words = ["1 token" if size == 1 else f"{size} tokens" for size in each.sizes.tolist()]
        elif each.greedy:
            words = ["the likeliest was taken"] * count
        elif each.grammar is not None:
            words = ["what its grammar allows"] * count
        else:
            words = ["what may come before its end"] * min(each.min_new_tokens, count)
        left[each.begin : each.begin + len(words)] = words
    return left


def _at_mask(row: Row, values: Array | None) -> Array:
    whole = np.full(len(row.input_ids), np.nan, np.float32)
    if values is not None and len(values):
        whole[row.loss_mask] = values
    return whole


def _rounded(values: Array) -> list[float | None]:
    return [round(each, DIGITS) if np.isfinite(each) else None for each in values.astype(float).tolist()]


@dataclass(frozen=True)
class CompletionFigures:
    """What is known of one completion from its tokens."""

    tokens: int
    returns: float | None
    advantage: float | None
    """The mean over its trained tokens."""
    logprob: float | None
    """The same of the sampler's log-probs."""
    versions: tuple[int, int]
    trained: bool


def completion_figures(episode: Episode, trained: Sequence[TrainedRow]) -> dict[int, CompletionFigures]:
    """By their index in the episode; one that stands in several rows is told from where it is trained, if it is."""
    found: dict[int, CompletionFigures] = {}
    for number, row in enumerate(episode.rows):
        advantages = _at_mask(row, trained[number].advantages if number < len(trained) else None)
        for index in np.unique(row.completion_index[row.completion_index >= 0]).tolist():
            tokens = row.completion_index == index
            learnt = tokens & row.loss_mask
            if index in found and not learnt.any():
                continue
            versions = row.versions[tokens]
            found[index] = CompletionFigures(
                tokens=int(tokens.sum()),
                returns=_mean(row.returns[tokens]),
                advantage=_mean(advantages[learnt]),
                logprob=_mean(row.logprobs[tokens]),
                versions=(int(versions.min()), int(versions.max())),
                trained=bool(learnt.any()),
            )
    return found


def _mean(values: Array) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


@dataclass(frozen=True)
class Parting:
    """Where the tokens of one answer's conversation part from those of another."""

    place: int
    """How many tokens both have in common."""
    common: str
    """The last ones of these."""
    here: str
    there: str


@dataclass(frozen=True)
class Fork:
    """An answer that does not simply continue the one before it."""

    other: int
    """The answer that it is compared with."""
    parting: Parting | None
    """None = tokens are not kept."""


def forks(episode: Episode, texts: TokenTexts) -> dict[int, Fork]:
    """Every answer that does not simply continue the one before it, with what is different.

    An answer parts from its parent if the template rendered the conversation differently; from the first child of the
    same parent if that has another; and the beginning of another conversation parts from the first one.
    """
    children: dict[int | None, int] = {}
    found: dict[int, Fork] = {}
    tokens = _conversations(episode)
    for index, node in enumerate(episode.nodes):
        first = children.setdefault(node.parent, index)
        other = node.parent if node.parent is not None and not node.extends else first if first != index else None
        if other is not None:
            found[index] = Fork(other, _parting(tokens.get(other), tokens.get(index), texts))
    return found


def _conversations(episode: Episode) -> dict[int, Array]:
    """The tokens up to the end of each answer."""
    found: dict[int, Array] = {}
    for row in episode.rows:
        backwards = row.completion_index[::-1]
        for index, place in zip(*np.unique(backwards, return_index=True), strict=True):
            if index >= 0:
                found.setdefault(int(index), row.input_ids[: len(backwards) - int(place)])
    return found


def _parting(there: Array | None, here: Array | None, texts: TokenTexts) -> Parting | None:
    if there is None or here is None:
        return None
    length = min(len(there), len(here))
    differs = np.flatnonzero(there[:length] != here[:length])
    place = int(differs[0]) if len(differs) else length

    def text(ids: Array) -> str:
        return "".join(texts.of(ids.tolist()))

    return Parting(
        place,
        text(here[max(0, place - AROUND) : place]),
        text(here[place : place + AROUND]),
        text(there[place : place + AROUND]),
    )


def run_config(store: StoreSearch) -> dict[str, Any]:
    config: dict[str, Any] = store.meta().get("config") or {}
    return config
