"""How a group and a step are written down: the rows of each table, and what of a conversation can be searched."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import fsum, sqrt
from typing import Any, NamedTuple

import orjson

from areal.api.messages import Episode, GroupResult, Rejection, TrainedRow
from areal.store.blobs import by_name, columns_of, pack
from areal.store.checks import batch_digest, checks_of
from areal.store.schema import READY, RUNNING, TRAINED, StoreError
from areal.utils.shorten import shown

PREVIEW_CHARACTERS = 160
TASK_CHARACTERS = 65_536
BLOBS = ("conversations", "rows", "trained")
"""Tables with a row for each group."""
PLAIN_FIELDS = [each.name for each in fields(Episode) if each.name not in ("rows", "nodes")]
"""Of an episode; the others are not plain values."""


@dataclass(frozen=True)
class StepRecord:
    """A step that has been taken. Its weights are published only when this is committed."""

    step: int
    version: int
    digest: str
    """Of the weights it led to."""
    batch: Sequence[int]
    """The task ids of its groups, in the order in which they were trained."""
    figures: Mapping[str, float | None]
    """Its line of metrics."""
    account: Mapping[str, Any]
    """Totals of the run."""
    trained: Mapping[int, Sequence[Sequence[TrainedRow]]] = field(default_factory=dict)
    """By task id: of each episode, row by row."""


@dataclass(frozen=True)
class GroupEnded:
    """The change that writes down a group with its episodes and rejections."""

    result: GroupResult
    state: str
    why: Rejection | None
    at: float
    step: int

    def __call__(self, db: sqlite3.Connection) -> None:
        result = self.result
        counts = [_counts(episode) for episode in result.episodes]
        oldest = min((each.oldest for each in counts if each.oldest is not None), default=None)
        mean, spread = _mean_and_spread([episode.reward for episode in result.episodes])
        known = db.execute("SELECT state, attempts FROM groups WHERE task_id = ?", (result.task_id,)).fetchone()
        if known is None:
            db.execute(
                "INSERT INTO groups (task_id, state, began, began_version) VALUES (?, ?, ?, ?)",
                (result.task_id, self.state, self.at, oldest or 0),
            )
        if known is None or known["state"] != READY:  # else it has its episodes already
            if known is not None and tuple(known) != (RUNNING, 1):  # it was tried before
                forget(db, ("episodes", *BLOBS), result.task_id)
            _write_episodes(db, result.task_id, result.episodes, counts)
            for rejection in result.rejections:
                self._reject(db, rejection)
        if self.why is not None:
            for _ in result.episodes:  # that were not rejected by themselves
                self._reject(db, self.why)
        reason, step = (None, None) if self.why is None else (str(self.why.reason), self.step)
        db.execute(
            "UPDATE groups SET state = ?, ended = ?, oldest_version = ?, reason = ?, episodes = ?, tokens = ?, "
            "reward = ?, reward_spread = ?, digests = ?, step = ?, kept = 1 WHERE task_id = ?",
            (
                self.state,
                self.at,
                oldest,
                reason,
                len(result.episodes),
                sum(each.trained for each in counts),
                mean,
                spread,
                to_json(result.digests),
                step,
                result.task_id,
            ),
        )
        if self.why is not None:
            db.execute(
                "UPDATE episodes SET state = ?, reason = ?, step = ? WHERE task_id = ?",
                (self.state, reason, step, result.task_id),
            )

    def _reject(self, db: sqlite3.Connection, why: Rejection) -> None:
        db.execute(
            "INSERT INTO rejections (at, task_id, step, reason, detail, trace) VALUES (?, ?, ?, ?, ?, ?)",
            (self.at, self.result.task_id, self.step, str(why.reason), _storable(why.detail), _storable(why.trace)),
        )


def _mean_and_spread(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Without numpy or `statistics`, which take ten times as long for a few numbers."""
    if not rewards:
        return None, None
    mean = fsum(rewards) / len(rewards)
    return mean, sqrt(fsum([(reward - mean) ** 2 for reward in rewards]) / len(rewards))


class _Counts(NamedTuple):
    """Of an episode's tokens."""

    trained: int
    others: int
    oldest: int | None
    """The version of its oldest trained token; None if there is none."""
    newest: int | None


def _counts(episode: Episode) -> _Counts:
    every = sum(len(row.loss_mask) for row in episode.rows)
    trained = episode.trained_tokens
    return _Counts(trained, every - trained, episode.oldest_version, episode.newest_version)


def _write_episodes(
    db: sqlite3.Connection, task_id: int, episodes: Sequence[Episode], counts: Sequence[_Counts]
) -> None:
    """Of a group that has none here."""
    if not episodes:
        return
    db.executemany(
        "INSERT INTO episodes (task_id, sample, state, reward, tokens, prompt_tokens, oldest_version, newest_version, "
        "calls, seconds, truncated) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (task_id, sample, READY, each.reward, *tokens, each.calls, each.seconds, each.truncated)
            for sample, (each, tokens) in enumerate(zip(episodes, counts, strict=True))
        ],
    )
    (last,) = db.execute("SELECT last_insert_rowid()").fetchone()
    texts = enumerate(map(_conversation_text, episodes), last - len(episodes) + 1)
    db.executemany("INSERT INTO texts (rowid, body) VALUES (?, ?)", texts)
    conversations = [
        {name: getattr(each, name) for name in PLAIN_FIELDS} | {"nodes": by_name(each.nodes)} for each in episodes
    ]
    previews = to_json([_preview(each) for each in episodes])
    db.execute("INSERT INTO conversations VALUES (?, ?, ?)", (task_id, previews, pack(conversations)))
    rows = columns_of([each.rows for each in episodes])
    db.execute("INSERT INTO rows VALUES (?, ?, ?)", (task_id, pack(rows), checks_of(rows)))


def write_step(db: sqlite3.Connection, record: StepRecord, at: float) -> None:
    batch = batch_digest((task_id, _stored_checks(db, task_id)) for task_id in record.batch)
    db.execute(
        "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)",
        (record.step, at, record.version, record.digest, batch, to_json(record.account)),
    )
    for place, task_id in enumerate(record.batch):
        changed = db.execute(
            "UPDATE groups SET state = ?, step = ?, place = ? WHERE task_id = ? AND state = ?",
            (TRAINED, record.step, place, task_id, READY),
        )
        if changed.rowcount != 1:
            raise StoreError(
                f"step {record.step} trained the group of task {task_id}, which was not ready to be trained"
            )
        db.execute(
            "UPDATE episodes SET state = ?, step = ?, staleness = ? - oldest_version WHERE task_id = ?",
            (TRAINED, record.step, record.version - 1, task_id),
        )
    write_metrics(db, record.step, record.figures)


def write_trained(db: sqlite3.Connection, record: StepRecord) -> None:
    """What the trainer computed in a step that is written."""
    trained = [(task_id, pack(columns_of(rows))) for task_id, rows in record.trained.items()]
    db.executemany("INSERT OR REPLACE INTO trained VALUES (?, ?)", trained)


def _stored_checks(db: sqlite3.Connection, task_id: int) -> bytes:
    """The checksums of a group, as they were written with its tokens."""
    found = db.execute("SELECT checks FROM rows WHERE task_id = ?", (task_id,)).fetchone()
    return b"" if found is None else bytes(found["checks"])


def write_metrics(db: sqlite3.Connection, step: int, figures: Mapping[str, float | None]) -> None:
    db.execute("INSERT INTO metrics (step, figures) VALUES (?, ?)", (step, to_json(figures)))


def forget(db: sqlite3.Connection, tables: Sequence[str], task_id: int) -> None:
    for table in tables:
        db.execute(f"DELETE FROM {table} WHERE task_id = ?", (task_id,))


def _preview(episode: Episode) -> str:
    """The beginning of what the model said last, on one line."""
    for message in reversed(episode.messages):
        if message.get("role") == "assistant":
            return _storable(" ".join(_text(message).split())[:PREVIEW_CHARACTERS])
    return ""


def _conversation_text(episode: Episode) -> str:
    """What full-text search looks at: everything that was said in the tree, once."""
    of_tree = [message for node in episode.nodes for message in (*node.messages, node.message)]
    return _storable("\n".join(dict.fromkeys([_text(message) for message in (*episode.messages, *of_tree)])))


def _text(message: Mapping[str, Any]) -> str:
    """Everything that is said in a message, the calls of tools included."""
    content, thoughts, calls = message.get("content"), message.get("reasoning_content"), message.get("tool_calls")
    if isinstance(content, str) and not thoughts and not calls:  # nearly every message
        return content
    said = [content, thoughts]
    called = [call.get("function", call) for call in calls or [] if isinstance(call, dict)]
    said += [text for each in called if isinstance(each, dict) for text in (each.get("name"), each.get("arguments"))]
    return "\n".join(each if isinstance(each, str) else to_json(each) for each in said if each)


def task_text(task: Mapping[str, Any]) -> str:
    """A task as JSON where that can express it; what it cannot is shown."""
    text = to_json(task)
    return text if len(text) <= TASK_CHARACTERS else to_json({"shortened": text[:TASK_CHARACTERS]})


def to_json(value: Any) -> str:
    try:
        options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        return orjson.dumps(value, default=lambda each: shown(each, PREVIEW_CHARACTERS), option=options).decode()
    except (TypeError, ValueError):  # a number beyond 64 bits, half of a surrogate pair
        return json.dumps(value, default=lambda each: shown(each, PREVIEW_CHARACTERS), skipkeys=True)


def _storable(text: str) -> str:
    """SQLite takes no half of a surrogate pair, which a model may write."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
