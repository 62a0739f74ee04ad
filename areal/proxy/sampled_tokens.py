"""What clients are told of each sampled token: its text and bytes, its log-prob, and the likeliest in its place.

Which tokens belong to a part of a stream is known when the part comes out: those that were fed since the part before.
"""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from areal.api.io_struct import Alternatives, ModelResponse
from areal.proxy.streaming import UNFINISHED, AnswerStream
from areal.proxy.types import SampledToken, TokenChance
from areal.trajectory.parsers.base import Text
from areal.trajectory.rendering import Renderer

LEAST = -9999.0
"""Stands for log-probs that JSON cannot write."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenSpeller:
    """The text and the bytes of a model's tokens."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._bytes = _byte_alphabet()

    def chance(self, token: int, logprob: float) -> TokenChance:
        text = self._renderer.decode([token])
        raw = text.encode(errors="replace") if UNFINISHED not in text else self._part_of_character(token, text)
        recorded = float(np.float32(logprob))  # as the session's tree has it
        return TokenChance(text, raw, recorded if recorded > LEAST else LEAST)

    def sampled(self, token: int, logprob: float, others: dict[int, float], of_text: bool) -> SampledToken:
        alternatives = [self.chance(other, chance) for other, chance in others.items()]
        return SampledToken(self.chance(token, logprob), alternatives, of_text)

    def _part_of_character(self, token: int, text: str) -> bytes:
        """Vocabularies write bytes as characters, each byte as one, or as `<0x0A>`."""
        piece = self._renderer.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return text.encode()
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        known = [self._bytes.get(character) for character in piece]
        return text.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write bytes: those that Latin-1 prints as they are, the others from U+0100 on."""
    printed = [byte for byte in range(256) if chr(byte).isprintable() and byte != 0x20]
    alphabet = {chr(byte): byte for byte in printed}
    others = (byte for byte in range(256) if byte not in printed)
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenReports:
    """The tokens of one streamed answer that no part of it has brought yet."""

    def __init__(self, speller: TokenSpeller) -> None:
        self._speller = speller
        self._waiting: list[tuple[int, float, dict[int, float]]] = []

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], alternatives: Alternatives) -> None:
        self._waiting += zip(tokens, logprobs, alternatives or [{}] * len(tokens), strict=True)

    def take(self, *, of_text: bool) -> list[SampledToken]:
        waiting, self._waiting = self._waiting, []
        return [self._speller.sampled(*each, of_text) for each in waiting]


def reported(
    speller: TokenSpeller, stream: AnswerStream, response: ModelResponse, text: str, count: int
) -> list[SampledToken]:
    """The first `count` tokens of a finished answer, told apart as they would be in a stream."""
    reports, told = TokenReports(speller), []
    alternatives = response.output_alternatives or [{}] * count
    for place in range(count):
        token = response.output_tokens[place]
        reports.add([token], response.output_logprobs[place : place + 1], alternatives[place : place + 1])
        told += _brought(reports, stream.feed([token]))
    told += _brought(reports, stream.finish(text))
    return [*told, *reports.take(of_text=False)]


def _brought(reports: TokenReports, events: "Iterable[object]") -> list[SampledToken]:
    return [token for event in events for token in reports.take(of_text=isinstance(event, Text))]
