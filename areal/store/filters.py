"""What people type to find episodes, as conditions of SQL:

    reward<0.5 tokens>200 step:300-500 state:trained,ready "the parcel is lost"

Every word must hold. A word is a column, one of < <= > >= = != : and a value; after : and = come a value, several with
commas between them, or a range, A-B or A..B, of which one end may be left out (`step:300..`). `truncated` alone is
`truncated:yes`. What stands in double quotes is looked for in conversations, word after word, whatever their case.

What is typed reaches SQL only as parameters; names of columns come from the table below. Anything else is refused in
one line, with what was probably meant.
"""

import difflib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from areal.api.errors import RejectReason
from areal.store.schema import STATES, StoreError
from areal.utils.shorten import shortened, shown

Value = float | str

MOST_CHARACTERS = 2000
MOST_WORDS = 50
"""Of one filter, which SQLite takes without complaint."""
NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
WORD = re.compile(r"(?P<name>[A-Za-z_]+)(?P<operator><=|>=|!=|<|>|=|:)(?P<value>.*)", re.DOTALL)
RANGE = re.compile(rf"(?P<least>{NUMBER})-(?P<most>{NUMBER})|(?P<from>{NUMBER})?\.\.(?P<to>{NUMBER})?")
PART = re.compile(r'\s*(?:"(?P<phrase>[^"]*)"|(?P<open>")|(?P<word>[^\s"]+))')
YES = {"yes": 1, "true": 1, "1": 1, "no": 0, "false": 0, "0": 0}


class FilterError(StoreError):
    """A filter, or an order, that means nothing."""


@dataclass(frozen=True)
class Column:
    name: str
    """In the table of episodes."""
    kind: Literal["number", "word", "yes or no"] = "number"
    words: tuple[str, ...] = ()
    """Those that it can hold."""
    may_be_unknown: bool = False


COLUMNS = {
    "id": Column("id"),
    "group": Column("task_id"),
    "sample": Column("sample"),
    "state": Column("state", "word", STATES),
    "reason": Column("reason", "word", tuple(RejectReason), may_be_unknown=True),
    "step": Column("step", may_be_unknown=True),
    "reward": Column("reward"),
    "tokens": Column("tokens"),
    "prompt": Column("prompt_tokens"),
    "calls": Column("calls"),
    "turns": Column("calls"),
    "seconds": Column("seconds"),
    "version": Column("oldest_version", may_be_unknown=True),
    "staleness": Column("staleness", may_be_unknown=True),
    "truncated": Column("truncated", "yes or no"),
}


@dataclass(frozen=True)
class EpisodeFilter:
    """Conditions on the table of episodes, and what must have been said."""

    conditions: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()
    """Of the question marks in the conditions."""
    phrases: tuple[str, ...] = ()
    columns: frozenset[str] = frozenset()
    """Those that the conditions are about."""

    def match(self) -> str:
        """The phrases as FTS5 takes them."""
        return " AND ".join(f'"{phrase}"' for phrase in self.phrases)

    def __and__(self, other: "EpisodeFilter") -> "EpisodeFilter":
        return EpisodeFilter(
            self.conditions + other.conditions,
            self.values + other.values,
            self.phrases + other.phrases,
            self.columns | other.columns,
        )


def parse_filter(line: str) -> EpisodeFilter:
    """Raises FilterError; an empty line finds everything."""
    if len(line) > MOST_CHARACTERS:
        raise FilterError(f"a filter may have {MOST_CHARACTERS} characters, got {len(line)}; search for less")
    parts = list(PART.finditer(line.strip()))
    if len(parts) > MOST_WORDS:
        raise FilterError(f"a filter may have {MOST_WORDS} words, got {len(parts)}; search for less")
    found = EpisodeFilter()
    for part in parts:
        if part["open"]:
            raise FilterError(f'text must be in two double quotes, got one in {shown(line)}; write "some words"')
        found &= _phrase(part["phrase"]) if part["word"] is None else _condition(part["word"])
    return found


def find_column(name: str) -> Column:
    """By the name that people type; raises FilterError."""
    column = COLUMNS.get(name.lower())
    if column is None:
        raise FilterError(f"there is no column {shown(name)}; {_meant(name, tuple(COLUMNS))}")
    return column


def parse_range(text: str) -> tuple[float | None, float | None]:
    """`300-500`, `300..`, `..500`; None = there is no such end. Raises FilterError."""
    ends = RANGE.fullmatch(text)
    low, high = (None, None) if ends is None else (ends["least"] or ends["from"], ends["most"] or ends["to"])
    if low is None and high is None:
        raise FilterError(f"a range is 300-500, 300.. or ..500, got {shown(text)}")
    least, most = (None if each is None else _plain_number(each) for each in (low, high))
    if least is not None and most is not None and least > most:
        raise FilterError(f"a range must go up, got {shown(text)}; write {shortened(f'{high}-{low}')}")
    return least, most


def _phrase(text: str) -> EpisodeFilter:
    clean = text.replace("\0", " ").encode("utf-8", "replace").decode()
    if not any(unicodedata.category(character)[0] in "LN" for character in clean):
        raise FilterError(f"text to search for must have a letter or a digit, got {shown(text)}")
    return EpisodeFilter(phrases=(clean,))


def _condition(word: str) -> EpisodeFilter:
    parts = WORD.fullmatch(word)
    if parts is None:
        return _bare_word(word)
    name, operator, value = parts["name"], parts["operator"], parts["value"]
    column = find_column(name)
    if not value:
        raise FilterError(f"{name} must be compared with something, got {shown(word)}; write {_example(name, column)}")
    if column.kind != "number":
        return _words(name, column, operator, value)
    if operator in ":=" and RANGE.fullmatch(value):
        return _range(column, *parse_range(value))
    numbers = [_number(name, column, each) for each in value.split(",")]
    if operator in (":", "=", "!="):
        return _among(column, operator, numbers)
    if len(numbers) > 1:
        raise FilterError(f"{operator} compares with one number, got {shown(word)}; write {name}:1,2 for several")
    return _where(column, f"{column.name} {operator} ?", *numbers)


def _bare_word(word: str) -> EpisodeFilter:
    column = COLUMNS.get(word.lower())
    if column is not None and column.kind == "yes or no":
        return _where(column, f"{column.name} = 1")
    if column is not None:
        raise FilterError(f"{word} must be compared with something; write {_example(word, column)}")
    for name in ("state", "reason"):
        if word.lower() in COLUMNS[name].words:
            raise FilterError(f"{shown(word)} is no filter; write {name}:{word.lower()}")
    quoted = shown(word)[1:-1].replace('"', "")
    raise FilterError(f'{shown(word)} is no filter; write "{quoted}" for text, or a column and a value: reward<0.5')


def _range(column: Column, low: float | None, high: float | None) -> EpisodeFilter:
    ends = [(f"{column.name} >= ?", low), (f"{column.name} <= ?", high)]
    given = [(condition, value) for condition, value in ends if value is not None]
    return _where(column, " AND ".join(condition for condition, _ in given), *(value for _, value in given))


def _words(name: str, column: Column, operator: str, value: str) -> EpisodeFilter:
    if operator not in (":", "=", "!="):
        raise FilterError(f"{name} is a word, so {operator} cannot compare it; write {_example(name, column)}")
    chosen: list[Value] = []
    for each in value.lower().split(","):
        known = YES if column.kind == "yes or no" else {word: word for word in column.words}
        if each not in known:
            raise FilterError(f"there is no {name} {shown(each)}; {_meant(each, tuple(known))}")
        chosen.append(known[each])
    return _among(column, operator, chosen)


def _among(column: Column, operator: str, values: Sequence[Value]) -> EpisodeFilter:
    """What is unknown is none of the values that are ruled out."""
    places = ", ".join("?" * len(values))
    if operator == "!=":
        return _where(column, f"({column.name} IS NULL OR {column.name} NOT IN ({places}))", *values)
    return _where(column, f"{column.name} IN ({places})", *values)


def _where(column: Column, condition: str, *values: Value) -> EpisodeFilter:
    return EpisodeFilter((condition,), values, (), frozenset([column.name]))


def _number(name: str, column: Column, text: str) -> float:
    if re.fullmatch(NUMBER, text) is None:
        raise FilterError(f"{name} must be compared with a number, got {shown(text)}; write {_example(name, column)}")
    return _plain_number(text)


def _plain_number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _example(name: str, column: Column) -> str:
    if column.kind == "yes or no":
        return f"{name}:yes"
    return f"{name}:{column.words[0]}" if column.kind == "word" else f"{name}<2 or {name}:2-5"


def _meant(wrong: str, choices: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(wrong.lower()[:40], choices, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(choices)}"
