"""Reads a run store, also while its run goes on and after it was killed.

A `StoreReader` sees what is committed, each call as of its own moment.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from areal.api.messages import Episode, GroupResult, Node, Row, TrainedRow
from areal.store.blobs import episodes_of, from_names, unpack
from areal.store.checks import batch_digest, checks_of, differing_fields
from areal.store.schema import (
    DAMAGE,
    EVALUATION,
    FAILED,
    PUBLISHED,
    READY,
    REJECTED,
    SETTLED,
    STORE_FILE,
    TRAINED,
    open_for_reading,
    unreadable,
)
from areal.utils.closing import Closing

GroupChecks = dict[int, bytes]
"""The checksums of groups (checks.py) by task."""
ROWS, GROUPS = "rows", "groups"
_ROWS_OF_STEP = "FROM groups g JOIN rows r USING (task_id) WHERE g.step = ? AND g.state = ? ORDER BY g.place"
UNREADABLE = (zlib.error, ValueError, TypeError, KeyError, AttributeError)
"""What reading rows raises if their bytes are not what was written."""


@dataclass(frozen=True)
class StoredStep:
    step: int
    at: float
    version: int
    digest: str
    """Of the weights it led to."""
    batch: str
    """Digest of what it trained (checks.py)."""
    account: dict[str, Any]
    """Totals of the run by then."""


@dataclass(frozen=True)
class Altered:
    """Something of a stored batch that is not as it was written."""

    field: str
    """Of rows; ROWS = they cannot be read, GROUPS = which groups the batch has, or their order."""
    task_id: int | None = None


class StoreReader(Closing):
    def __init__(self, directory: Path, *, at_rest: bool = False) -> None:
        """Raises StoreError if the run in that directory has no store.

        `at_rest`: no run will be started there meanwhile. Then nothing is left beside a store whose run has ended.

        Used in a `with` block, it raises StoreError for what turns out to be damaged there.
        """
        self.path = directory / STORE_FILE
        self._db = open_for_reading(self.path, at_rest=at_rest)

    def close(self) -> None:
        self._db.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()
        error = exc_info[1]
        if isinstance(error, DAMAGE):
            raise unreadable(self.path, error) from error

    def bytes(self) -> int:
        """What the store takes on the disk, once SQLite has moved all that is committed into the one file."""
        (pages,), (size,) = (self._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        return int(pages) * int(size)

    def meta(self) -> dict[str, Any]:
        return {name: json.loads(value) for name, value in self._db.execute("SELECT name, value FROM meta")}

    def sessions(self) -> list[dict[str, Any]]:
        """Each start of the run, oldest first."""
        rows = self._db.execute("SELECT * FROM sessions ORDER BY id")
        return [{**dict(row), "machine": json.loads(row["machine"])} for row in rows]

    def steps(self, after: int = 0) -> list[StoredStep]:
        rows = self._db.execute("SELECT * FROM steps WHERE step > ? ORDER BY step", (after,))
        return [StoredStep(**{**dict(row), "account": json.loads(row["account"])}) for row in rows]

    def digest(self, version: int) -> str | None:
        """Of the weights that a step led to, or that were published before the first; None if that is not known."""
        found = self._db.execute("SELECT digest FROM steps WHERE version = ?", (version,)).fetchone()
        if found is not None:
            return str(found["digest"])
        published = [each["detail"] for each in self.events(PUBLISHED)] if version == 0 else []
        return next((str(each["digest"]) for each in published if each["version"] == 0), None)

    def metrics(self, step: int | None = None, *, first_step: int = 0) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl, of one step or from one on, in the order in which they were written."""
        found = self._db.execute(
            "SELECT step, figures FROM metrics WHERE step >= ? AND (? IS NULL OR step = ?) ORDER BY step, id",
            (first_step, step, step),
        )
        for number, figures in found:
            yield {"step": number, **json.loads(figures)}

    def metrics_per_step(self) -> dict[int, int]:
        """How many lines each step has."""
        return dict(self._db.execute("SELECT step, count(*) FROM metrics GROUP BY step").fetchall())

    def episodes_per_step(self) -> dict[int, int]:
        """How many episodes each step has trained."""
        counted = "SELECT step, count(*) FROM episodes WHERE state = ? GROUP BY step"
        return dict(self._db.execute(counted, (TRAINED,)).fetchall())

    def evaluations(self) -> list[dict[str, Any]]:
        """What each evaluation measured, oldest first, with its `step`."""
        return [{"step": each["step"], **each["detail"]} for each in self.events(EVALUATION)]

    def batch(self, step: int) -> list[GroupResult] | None:
        """The groups of a step, in the order in which they were trained; None if their tokens are not kept."""
        ids = self._db.execute(
            "SELECT task_id FROM groups WHERE step = ? AND state = ? ORDER BY place", (step, TRAINED)
        )
        groups = [self._group(task_id) for (task_id,) in ids.fetchall()]
        return None if any(group is None for group in groups) else [group for group in groups if group is not None]

    def altered(self, step: int) -> list[Altered]:
        """What of a step's batch is not as it was written; nothing of tokens that are not kept."""
        (written,) = self._db.execute("SELECT batch FROM steps WHERE step = ?", (step,)).fetchone()
        found = self._db.execute(f"SELECT task_id, data, checks {_ROWS_OF_STEP}", (step, TRAINED))
        altered: list[Altered] = []
        groups: GroupChecks = {}
        for task_id, data, checks in found:
            groups[task_id] = checks
            altered += [Altered(name, task_id) for name in _altered_fields(data, checks)]
        if groups and not altered and batch_digest(groups.items()) != written:
            altered.append(Altered(GROUPS))
        return altered

    def checks(self, step: int) -> GroupChecks:
        """Of a step's groups, in the order in which they were trained."""
        return dict(self._db.execute(f"SELECT task_id, checks {_ROWS_OF_STEP}", (step, TRAINED)).fetchall())

    def keeps_batch(self, step: int) -> bool:
        """Whether `batch` has the groups of a step."""
        trained, kept = self._db.execute(
            "SELECT count(*), count(r.task_id) FROM groups g LEFT JOIN rows r USING (task_id) "
            "WHERE g.step = ? AND g.state = ?",
            (step, TRAINED),
        ).fetchone()
        return bool(trained and trained == kept)

    def rollouts(self, step: int) -> Iterator[dict[str, Any]]:
        """The lines of rollouts.jsonl of a step: its episodes in the order in which they were trained."""
        found = self._db.execute(
            "SELECT e.* FROM groups g JOIN episodes e USING (task_id) WHERE g.step = ? AND g.state = ? "
            "ORDER BY g.place, e.sample",
            (step, TRAINED),
        )
        for task_id, lines in groupby(found.fetchall(), key=itemgetter("task_id")):
            episodes = self.episodes(task_id)
            for each in lines:
                line = rollout_line(step, task_id, episodes[each["id"]])
                kept = {"version_min": "oldest_version", "version_max": "newest_version", "tokens": "tokens"}
                yield {**line, **{name: each[column] for name, column in kept.items()}}

    def ready(self) -> list[GroupResult]:
        """The groups that have ended and were not trained yet, in the order of their tasks."""
        ids = self._db.execute("SELECT task_id FROM groups WHERE state = ? ORDER BY task_id", (READY,)).fetchall()
        return [group for (task_id,) in ids if (group := self._group(task_id)) is not None]

    def settled(self) -> list[int]:
        """The ids of the tasks that were trained or rejected."""
        states = (TRAINED, REJECTED, SETTLED)
        return [
            task_id for (task_id,) in self._db.execute("SELECT task_id FROM groups WHERE state IN (?, ?, ?)", states)
        ]

    def trained_tokens(self) -> int:
        """Sampled tokens that were trained."""
        (tokens,) = self._db.execute("SELECT sum(tokens) FROM groups WHERE state = ?", (TRAINED,)).fetchone()
        return tokens or 0

    def states(self) -> dict[str, int]:
        """How many groups are in each state."""
        return dict(self._db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())

    def checkpoints(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._db.execute("SELECT * FROM checkpoints ORDER BY step")]

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        rows = self._db.execute("SELECT * FROM events WHERE ? IS NULL OR kind = ? ORDER BY id", (kind, kind))
        return [{**dict(row), "detail": json.loads(row["detail"])} for row in rows]

    def failure(self) -> str | None:
        """The error that ended the newest session of the run; None = it goes on, or ended otherwise."""
        newest = "kind = ? AND at >= (SELECT max(began) FROM sessions) ORDER BY id DESC LIMIT 1"
        found = self._db.execute(f"SELECT detail FROM events WHERE {newest}", (FAILED,)).fetchone()
        return None if found is None else str(json.loads(found["detail"])["error"])

    def rejections(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._db.execute("SELECT * FROM rejections ORDER BY id")]

    def rejected(self) -> dict[str, int]:
        """How many episodes were rejected for each reason."""
        return dict(self._db.execute("SELECT reason, count(*) FROM rejections GROUP BY reason").fetchall())

    def task(self, task_id: int) -> str:
        """As JSON, cut if it is very long; empty = the store does not know it."""
        found = self._db.execute("SELECT task FROM groups WHERE task_id = ?", (task_id,)).fetchone()
        return "" if found is None else str(found[0])

    def episodes(self, task_id: int) -> dict[int, Episode]:
        """Those of a group by their numbers, sample by sample, with their rows if these are kept."""
        found = self._blobs(task_id, "conversations", "rows")
        if found is None:
            return {}
        numbers, data, rows = found
        kept = {} if rows is None else episodes_of(unpack(rows), Row)
        return {
            number: Episode(rows=kept.get(sample, []), nodes=from_names(others.pop("nodes", ()), Node), **others)
            for sample, (number, others) in enumerate(zip(numbers, unpack(data), strict=True))
        }

    def trained(self, task_id: int) -> dict[int, list[TrainedRow]]:
        """What the trainer computed for the rows of each episode of a group; empty if nothing, or if it is not kept."""
        found = self._blobs(task_id, "trained")
        if found is None:
            return {}
        numbers, data = found
        return {numbers[sample]: rows for sample, rows in episodes_of(unpack(data), TrainedRow).items()}

    def episode(self, number: int) -> Episode:
        """Raises KeyError if there is none of that number."""
        return self.episodes(self._task_of(number))[number]

    def trained_rows(self, number: int) -> list[TrainedRow]:
        """What the trainer computed for an episode's rows; empty if it was not trained or it is not kept."""
        return self.trained(self._task_of(number)).get(number, [])

    def _task_of(self, number: int) -> int:
        found = self._db.execute("SELECT task_id FROM episodes WHERE id = ?", (number,)).fetchone()
        if found is None:
            raise KeyError(number)
        return int(found["task_id"])

    def _blobs(self, task_id: int, table: str, other: str | None = None) -> list[Any] | None:
        """The numbers of a group's episodes, and its blobs in these tables; None if the first has none.

        All as of one moment: the group may be tried again meanwhile.
        """
        numbers = "SELECT json_group_array(id) FROM (SELECT id FROM episodes WHERE task_id = ?1 ORDER BY sample)"
        columns, join = ("a.data, b.data", f"LEFT JOIN {other} b USING (task_id)") if other else ("a.data", "")
        found = self._db.execute(
            f"SELECT ({numbers}), {columns} FROM {table} a {join} WHERE task_id = ?1", (task_id,)
        ).fetchone()
        return None if found is None else [json.loads(found[0]), *found[1:]]

    def _group(self, task_id: int) -> GroupResult | None:
        """None if its tokens are not kept."""
        (digests, kept) = self._db.execute(
            "SELECT digests, EXISTS (SELECT * FROM rows r WHERE r.task_id = g.task_id) FROM groups g WHERE task_id = ?",
            (task_id,),
        ).fetchone()
        reported = {int(version): digest for version, digest in json.loads(digests).items()}
        return GroupResult(task_id, list(self.episodes(task_id).values()), [], reported) if kept else None


def _altered_fields(data: bytes, checks: bytes) -> list[str]:
    try:
        return differing_fields(checks_of(unpack(data)), checks)
    except UNREADABLE:
        return [ROWS]


def rollout_line(step: int | None, task_id: int, episode: Episode) -> dict[str, Any]:
    """An episode in rollouts.jsonl."""
    return {
        "step": step,
        "task_id": task_id,
        "reward": episode.reward,
        "messages": episode.messages,
        "version_min": episode.oldest_version,
        "version_max": episode.newest_version,
        "tokens": episode.trained_tokens,
        "calls": episode.calls,
        "seconds": round(episode.seconds, 4),
        "turns": [(round(asked, 4), round(answered, 4), tokens) for asked, answered, tokens in episode.turns],
    }
