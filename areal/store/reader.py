"""Reads a run store, also while its run goes on and after it was killed.

A `StoreReader` sees what is committed, each call as of its own moment.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.messages import Episode, GroupResult, Node, Row, TrainedRow
from areal.store.blobs import from_names, unpack, unpack_all
from areal.store.checks import altered_fields, batch_digest
from areal.store.schema import STORE_FILE, open_for_reading
from areal.store.writer import EVALUATION, PUBLISHED, READY, REJECTED, SETTLED, TRAINED
from areal.utils.closing import Closing

EpisodeChecks = dict[tuple[int, int], bytes]
"""The checksums of episodes (checks.py) by task and sample."""
ROWS, GROUPS = "rows", "groups"
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
    sample: int | None = None


class StoreReader(Closing):
    def __init__(self, directory: Path, *, at_rest: bool = False) -> None:
        """Raises StoreError if the run in that directory has no store.

        `at_rest`: no run will be started there meanwhile. Then nothing is left beside a store whose run has ended.
        """
        self.path = directory / STORE_FILE
        self._db = open_for_reading(self.path, at_rest=at_rest)

    def close(self) -> None:
        self._db.close()

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
        found = self._db.execute(
            "SELECT g.task_id, e.sample, r.data, r.checks FROM groups g JOIN episodes e ON e.task_id = g.task_id "
            "JOIN rows r ON r.episode = e.id WHERE g.step = ? AND g.state = ? ORDER BY g.place, e.sample",
            (step, TRAINED),
        )
        altered: list[Altered] = []
        groups: dict[int, list[bytes]] = {}
        for task_id, sample, data, checks in found:
            groups.setdefault(task_id, []).append(checks)
            altered += [Altered(name, task_id, sample) for name in _altered_fields(data, checks)]
        if groups and not altered and batch_digest(groups.items()) != written:
            altered.append(Altered(GROUPS))
        return altered

    def checks(self, step: int) -> EpisodeChecks:
        """Of a step's episodes, in the order in which they were trained."""
        found = self._db.execute(
            "SELECT g.task_id, e.sample, r.checks FROM groups g JOIN episodes e ON e.task_id = g.task_id "
            "JOIN rows r ON r.episode = e.id WHERE g.step = ? AND g.state = ? ORDER BY g.place, e.sample",
            (step, TRAINED),
        )
        return {(task_id, sample): checks for task_id, sample, checks in found}

    def keeps_batch(self, step: int) -> bool:
        """Whether `batch` has the groups of a step."""
        trained, kept = self._db.execute(
            "SELECT count(*), count(r.episode) FROM episodes e LEFT JOIN rows r ON r.episode = e.id "
            "WHERE e.step = ? AND e.state = ?",
            (step, TRAINED),
        ).fetchone()
        return bool(trained and trained == kept)

    def rollouts(self, step: int) -> Iterator[dict[str, Any]]:
        """The lines of rollouts.jsonl of a step: its episodes in the order in which they were trained."""
        found = self._db.execute(
            "SELECT e.*, c.data FROM groups g JOIN episodes e USING (task_id) JOIN conversations c ON c.episode = e.id "
            "WHERE g.step = ? AND g.state = ? ORDER BY g.place, e.sample",
            (step, TRAINED),
        )
        for each in found:
            others = unpack(each["data"])
            others.pop("nodes", None)
            line = rollout_line(step, each["task_id"], Episode(rows=[], **others))
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

    def size_bytes(self) -> int:
        """Of the file, with what is not copied into it yet."""
        return sum(path.stat().st_size for path in self.path.parent.glob(f"{self.path.name}*"))

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

    def rejections(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._db.execute("SELECT * FROM rejections ORDER BY id")]

    def episode(self, number: int) -> Episode:
        """With its rows if they are kept. Raises KeyError if there is none of that number."""
        found = self._db.execute(
            "SELECT c.data, r.data AS rows FROM conversations c LEFT JOIN rows r USING (episode) WHERE c.episode = ?",
            (number,),
        ).fetchone()
        if found is None:
            raise KeyError(number)
        rows = [] if found["rows"] is None else unpack_all(found["rows"], Row)
        others = unpack(found["data"])
        return Episode(rows=rows, nodes=from_names(others.pop("nodes", ()), Node), **others)

    def trained_rows(self, number: int) -> list[TrainedRow]:
        """What the trainer computed for an episode's rows; empty if it was not trained or it is not kept."""
        found = self._db.execute("SELECT data FROM trained WHERE episode = ?", (number,)).fetchone()
        return [] if found is None else unpack_all(found["data"], TrainedRow)

    def _group(self, task_id: int) -> GroupResult | None:
        """None if the tokens of an episode are not kept."""
        kept = self._db.execute(
            "SELECT e.id, r.episode FROM episodes e LEFT JOIN rows r ON r.episode = e.id "
            "WHERE task_id = ? ORDER BY sample",
            (task_id,),
        ).fetchall()
        if any(row["episode"] is None for row in kept):
            return None
        (digests,) = self._db.execute("SELECT digests FROM groups WHERE task_id = ?", (task_id,)).fetchone()
        reported = {int(version): digest for version, digest in json.loads(digests).items()}
        return GroupResult(task_id, [self.episode(row["id"]) for row in kept], [], reported)


def _altered_fields(data: bytes, checks: bytes) -> list[str]:
    try:
        return altered_fields(unpack_all(data, Row), checks)
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
