"""Finds things in a run store, for whoever shows a run: episodes in pages, counts, histograms, curves, rejections.

Episodes are chosen by what `areal/store/filters.py` makes of a line that people type. Everything is computed from what
the store has, also while the run goes on: a scan of 100,000 episodes takes a few hundredths of a second
(`python -m benchmarks.store`), so nothing is aggregated beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import orjson

from areal.api.messages import Episode, TrainedRow
from areal.store.filters import Column, EpisodeFilter, FilterError, Value, find_column
from areal.store.reader import StoreReader
from areal.store.schema import TRAINED

T = TypeVar("T")

PAGE = 100
MOST_ON_A_PAGE = 1000
BINS = 40
ALL = EpisodeFilter()
COLUMN_OF_IDS = find_column("id")
TRAINED_ONLY = EpisodeFilter(("state = ?",), (TRAINED,))


@dataclass(frozen=True)
class EpisodeLine:
    """An episode as it stands in a list; its columns are those of the table."""

    id: int
    task_id: int
    sample: int
    state: str
    reason: str | None
    """Why its group was rejected."""
    step: int | None
    """Where its group was trained or rejected."""
    reward: float
    tokens: int
    """Those that are trained."""
    prompt_tokens: int
    calls: int
    seconds: float
    oldest_version: int | None
    newest_version: int | None
    staleness: int | None
    """Versions between the weights that were trained and the oldest that sampled; None = it was not trained."""
    truncated: bool
    preview: str
    """The beginning of what the model said last."""


Place = tuple[float | None, int]
"""Where a page ends: the value that it is ordered by, and the episode's id."""


@dataclass(frozen=True)
class Page:
    episodes: list[EpisodeLine]
    next: Place | None
    """What to give for `after` to get the next page; None = there is none."""


@dataclass(frozen=True)
class Histogram:
    edges: list[float]
    """One more than counts. A value on an edge is counted after it, on the last one before it."""
    counts: list[int]
    unknown: int
    """Episodes that have no value."""


@dataclass(frozen=True)
class CurvePoint:
    step: int
    episodes: int
    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class GroupLine:
    """A group as it stands in a list; its columns are those of the table."""

    task_id: int
    state: str
    attempts: int
    began: float
    ended: float | None
    began_version: int
    oldest_version: int | None
    step: int | None
    place: int | None
    """In the batch of its step."""
    reason: str | None
    episodes: int
    tokens: int
    reward: float | None
    reward_spread: float | None
    kept: bool
    """Whether its tokens are there."""
    task: str
    """JSON"""


@dataclass(frozen=True)
class RejectionKind:
    """What was rejected for one reason."""

    reason: str
    count: int
    by_step: list[tuple[int, int]]
    """How many in each step that has some."""
    at: float
    """Of the newest one that has a traceback, or else of the newest."""
    task_id: int
    detail: str
    trace: str


@dataclass(frozen=True)
class Trajectory:
    """Everything that is known of one episode."""

    line: EpisodeLine
    group: GroupLine
    episode: Episode
    """Without rows if its tokens are not kept."""
    trained: list[TrainedRow]
    """Row by row; empty if it was not trained, or its tokens are not kept."""


EPISODE_COLUMNS = ", ".join(f"e.{each.name}" for each in fields(EpisodeLine) if each.name != "preview")
GROUP_COLUMNS = ", ".join(each.name for each in fields(GroupLine))


class StoreSearch(StoreReader):
    def page(
        self, chosen: EpisodeFilter = ALL, order: str = "-id", after: Place | None = None, limit: int = PAGE
    ) -> Page:
        """Episodes in an order, `reward` or `-reward` for the largest first; those without a value come last.

        A page begins where the one before it ended, so that it is found as fast as the first, and an episode that was
        added meanwhile moves none from one page to the other. Raises FilterError for an order that there is not.
        """
        column, down = _parse_order(order)
        limit = max(1, min(limit, MOST_ON_A_PAGE))
        value, number = after if after is not None else (None, None)
        found: list[Any] = []
        if after is None or value is not None or not column.may_be_unknown:
            found += self._ordered(chosen & _following(column, down, value, number), column, down, limit + 1)
        if column.may_be_unknown and len(found) <= limit:
            unknown = EpisodeFilter((f"{column.name} IS NULL",))
            if number is not None and value is None:
                unknown &= _following(COLUMN_OF_IDS, down, None, number)
            found += self._ordered(chosen & unknown, COLUMN_OF_IDS, down, limit + 1 - len(found))
        shown = found[:limit]
        more = len(found) > limit
        return Page(self._lines(shown), (shown[-1][column.name], shown[-1]["id"]) if more else None)

    def count(self, chosen: EpisodeFilter = ALL) -> int:
        return int(self._select("count(*)", chosen)[0][0])

    def histogram(self, name: str, chosen: EpisodeFilter = ALL, bins: int = BINS) -> Histogram:
        """How a column's values are distributed. Raises FilterError for a column that there is not, or of words."""
        column = _number_column(name)
        ((known, every, low, high),) = self._select(
            f"count({column.name}), count(*), min({column.name}), max({column.name})", chosen
        )
        if not known:
            return Histogram([], [], every)
        edges = _edges(low, high, max(1, min(bins, MOST_ON_A_PAGE)))
        counted = self._select(
            f"max(0, min(?, CAST(({column.name} - ?) / ? AS INTEGER))) AS bin, count(*)",
            chosen & EpisodeFilter((f"{column.name} IS NOT NULL",)),
            "GROUP BY bin",
            before=(len(edges) - 2, edges[0], edges[1] - edges[0]),
        )
        counts = dict(tuple(row) for row in counted)
        return Histogram(edges, [counts.get(place, 0) for place in range(len(edges) - 1)], every - known)

    def curve(self, name: str, chosen: EpisodeFilter = ALL) -> list[CurvePoint]:
        """A column step by step: of trained episodes, unless the filter names states. Raises as `histogram` does."""
        column = _number_column(name)
        if "state" not in chosen.columns:
            chosen &= TRAINED_ONLY
        known = EpisodeFilter((f"{column.name} IS NOT NULL", "step IS NOT NULL"))
        of_step = f"step, count(*), avg({column.name}), min({column.name}), max({column.name})"
        return [CurvePoint(*row) for row in self._select(of_step, chosen & known, "GROUP BY step ORDER BY step")]

    def groups(self, step: int) -> list[GroupLine]:
        """Those that a step trained, in the order of its batch, and then those that were rejected in it."""
        found = self._db.execute(
            f"SELECT {GROUP_COLUMNS} FROM groups WHERE step = ? ORDER BY place IS NULL, place, task_id", (step,)
        )
        return [_group_line(row) for row in found]

    def group(self, task_id: int) -> GroupLine | None:
        """None if there is none of that number."""
        found = self._db.execute(f"SELECT {GROUP_COLUMNS} FROM groups WHERE task_id = ?", (task_id,)).fetchone()
        return None if found is None else _group_line(found)

    def rejection_kinds(self) -> list[RejectionKind]:
        """What was rejected, the most frequent reason first, each with one traceback."""
        by_reason: dict[str, list[tuple[int, int]]] = {}
        for reason, step, count in self._db.execute(
            "SELECT reason, step, count(*) FROM rejections GROUP BY reason, step"
        ):
            by_reason.setdefault(reason, []).append((step, count))
        kinds = [self._rejection_kind(reason, by_step) for reason, by_step in by_reason.items()]
        return sorted(kinds, key=lambda kind: -kind.count)

    def trajectory(self, number: int) -> Trajectory:
        """Raises KeyError if there is no episode of that number."""
        found = self._db.execute(f"SELECT {EPISODE_COLUMNS} FROM episodes e WHERE id = ?", (number,)).fetchall()
        if not found:
            raise KeyError(number)
        (line,) = self._lines(found)
        group = self.group(line.task_id)
        assert group is not None, "an episode belongs to a group"
        return Trajectory(line, group, self.episode(number), self.trained_rows(number))

    def _ordered(self, chosen: EpisodeFilter, column: Column, down: bool, limit: int) -> list[Any]:
        way = "DESC" if down else "ASC"
        # The index of texts yields its episodes in this order by itself, so that a common word needs no sorting.
        number = "texts.rowid" if chosen.phrases else "e.id"
        by = number if column is COLUMN_OF_IDS else f"e.{column.name} {way}, {number}"
        return self._select(EPISODE_COLUMNS, chosen, f"ORDER BY {by} {way} LIMIT ?", (limit,))

    def _select(
        self,
        columns: str,
        chosen: EpisodeFilter,
        rest: str = "",
        after: Sequence[Value] = (),
        before: Sequence[Value] = (),
    ) -> list[Any]:
        """Of the chosen episodes. `before` and `after` are parameters of the columns and of the rest."""
        conditions, values = list(chosen.conditions), list(chosen.values)
        source = "episodes e"
        if chosen.phrases:  # texts may have episodes that were deleted since
            source = "texts CROSS JOIN episodes e ON e.id = texts.rowid"
            conditions, values = ["texts MATCH ?", *conditions], [chosen.match(), *values]
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        return self._db.execute(f"SELECT {columns} FROM {source} {where} {rest}", (*before, *values, *after)).fetchall()

    def _lines(self, found: Sequence[Any]) -> list[EpisodeLine]:
        tasks = list({row["task_id"] for row in found})
        chosen = f"SELECT task_id, previews FROM conversations WHERE task_id IN ({', '.join('?' * len(tasks))})"
        previews = {
            (task_id, sample): text
            for task_id, texts in self._db.execute(chosen, tasks)
            for sample, text in enumerate(orjson.loads(texts))
        }
        # A row has the columns in the order of the fields; its group may be tried again meanwhile.
        return [
            EpisodeLine(*(*row[:-1], bool(row[-1]), previews.get((row["task_id"], row["sample"]), ""))) for row in found
        ]

    def _rejection_kind(self, reason: str, by_step: list[tuple[int, int]]) -> RejectionKind:
        newest = (
            "SELECT at, task_id, detail, trace FROM rejections WHERE reason = ? {} ORDER BY step DESC, id DESC LIMIT 1"
        )
        shown = (
            self._db.execute(newest.format("AND trace <> ''"), (reason,)).fetchone()
            or self._db.execute(newest.format(""), (reason,)).fetchone()
        )
        return RejectionKind(reason, sum(count for _, count in by_step), by_step, *shown)


def _parse_order(order: str) -> tuple[Column, bool]:
    down = order.startswith("-")
    return _number_column(order.removeprefix("-")), down


def _number_column(name: str) -> Column:
    column = find_column(name)
    if column.kind == "word":
        raise FilterError(f"a column of numbers is needed, got {name}; take reward or tokens, for example")
    return column


def _following(column: Column, down: bool, value: float | None, number: int | None) -> EpisodeFilter:
    """What comes after an episode in an order; with no number everything that has a value."""
    sign = "<" if down else ">"
    if number is None:
        return EpisodeFilter((f"e.{column.name} IS NOT NULL",)) if column.may_be_unknown else ALL
    if column is COLUMN_OF_IDS or value is None:
        return EpisodeFilter((f"e.id {sign} ?",), (number,))
    return EpisodeFilter((f"(e.{column.name}, e.id) {sign} (?, ?)",), (value, number))


def _edges(low: float, high: float, bins: int) -> list[float]:
    """Whole numbers get bins of whole numbers."""
    if isinstance(low, int) and isinstance(high, int):
        width = -(-(high - low + 1) // bins)
        return [low + width * place for place in range(-(-(high - low + 1) // width) + 1)]
    if low == high:
        return [low, low + 1]
    return [low + (high - low) * place / bins for place in range(bins + 1)]


def _group_line(row: Any) -> GroupLine:
    return GroupLine(**{**dict(row), "kept": bool(row["kept"])})
