"""Writes down a run while it goes on, on one thread that no model call waits for.

Callers hand over what happened and go on; the thread packs it and commits what has gathered in one transaction. Only a
step waits until it is committed, together with all that was handed over before it: from then on its groups are trained,
whatever is killed. A full disk does not lose anything: the thread keeps what it has, says so once, and tries again
until there is room or its patience ends.

Tokens that are not to be kept are removed a few groups at a time, between transactions, so that no step waits for it.
What a resumed run may need stays: the groups that are not trained yet, and those of steps after the oldest checkpoint.

Everything a caller hands over must not be changed afterwards.
"""

import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import orjson

from areal.api.messages import Episode, GroupResult, Rejection, TrainedRow
from areal.store.blobs import by_name, columns_of, pack
from areal.store.checks import batch_digest, checks_of
from areal.store.schema import STORE_FILE, StoreError, open_for_writing
from areal.utils import waits
from areal.utils.closing import Closing
from areal.utils.shorten import shown

MOST_AT_ONCE = 64
"""Changes in one transaction: a reader, and a kill, see them together."""
RETRY_SECONDS = 2.0
"""Between two looks whether a full disk has room again: nothing announces it."""
PATIENCE_SECONDS = 600.0
"""How long a full disk is waited for."""
LOG_BYTES = 8 << 20
"""How large the log of changes grows before it is copied to the file, after a step. That waits for the disk itself,
which the commits before it do not."""
MOST_LOG_BYTES = 64 << 20
"""The same between steps."""
FORGET_GROUPS = 8
"""How many groups lose their tokens in one transaction."""
VACUUM_PAGES = 256
"""By how much one transaction shrinks the file."""
SPARE_SHARE = 0.1
"""Of the file may be empty pages, which the next steps fill: giving them back only to ask for them costs twice."""
PREVIEW_CHARACTERS = 160
TASK_CHARACTERS = 65_536
FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""How SQLite reports that a disk takes nothing more, by the lowest byte of its codes."""
BLOBS = ("conversations", "rows", "trained")
"""Tables with a row for each group."""
ELSEWHERE = ("rows", "nodes")
"""Fields of an episode that are not plain values."""

RUNNING, READY, TRAINED, REJECTED, RETRY = "running", "ready", "trained", "rejected", "retry"
"""States of a group. To be tried again is one that ran when the driver ended, or whose step is taken back."""
SETTLED = "settled"
"""A checkpoint knows that it was trained or rejected; the store has lost which."""
STATES = (RUNNING, READY, TRAINED, REJECTED, RETRY, SETTLED)
EVALUATION = "evaluation"
"""The kind of event that an evaluation is."""
PUBLISHED = "published"
"""The same of a version that the engines were given."""

Change = Callable[[sqlite3.Connection], None]


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


class StoreWriter(Closing):
    def __init__(
        self,
        directory: Path,
        *,
        say: Callable[[str], None] = lambda line: None,
        patience_seconds: float = PATIENCE_SECONDS,
        keep_tokens: int | None = None,
    ) -> None:
        """`say` gets a line when the disk is full, and when it has room again; it is called on the thread.

        `keep_tokens` is of how many steps tokens are kept; None = of all.
        """
        self.path = directory / STORE_FILE
        self._connection = open_for_writing(self.path)
        self._log = directory / f"{STORE_FILE}-wal"
        self._say = say
        self._patience_seconds = patience_seconds
        self._keep_tokens = keep_tokens
        self._forget_before = 0
        self._changes: deque[tuple[Change, Future[None] | None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._is_full = False
        """The disk; the thread waits for room."""
        self._waits_for_room = True
        self._failure: StoreError | None = None
        self.cpu_seconds = 0.0
        """What writing has computed for."""
        self._step = int(self._connection.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0])
        self._thread = threading.Thread(target=self._run, name="run store", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Changes that were handed over and are not being written yet."""
        return len(self._changes)

    def session(self, first_step: int, machine: Mapping[str, Any]) -> None:
        """The run begins, or goes on. Groups that ran when it ended are to be tried again."""
        began = time.time()

        def change(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO sessions (began, first_step, machine) VALUES (?, ?, ?)",
                (began, first_step, _json(machine)),
            )
            db.execute("UPDATE groups SET state = ? WHERE state = ?", (RETRY, RUNNING))

        self._put(change)

    def set_meta(self, values: Mapping[str, Any]) -> None:
        pairs = [(name, _json(value)) for name, value in values.items()]
        self._put(lambda db: db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", pairs))

    def started(self, task_id: int, version: int, task: Mapping[str, Any]) -> None:
        """A group runs, for the first time or again."""
        began = time.time()

        def change(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO groups (task_id, state, began, began_version, task) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (task_id) DO UPDATE SET state = excluded.state, began = excluded.began, "
                "began_version = excluded.began_version, attempts = attempts + 1, step = NULL, place = NULL, "
                "reason = NULL, ended = NULL",
                (task_id, RUNNING, began, version, _task_text(task)),
            )

        self._put(change)

    def ready(self, result: GroupResult) -> None:
        """A group has ended and waits to be trained."""
        self._put(_GroupEnded(result, READY, None, time.time(), self._step))

    def rejected(self, result: GroupResult, why: Rejection) -> None:
        """A group will not be trained: one that has just ended, or one that was ready."""
        self._put(_GroupEnded(result, REJECTED, why, time.time(), self._step))

    def step(self, record: StepRecord) -> None:
        """Returns when the step is committed; raises StoreError if it cannot be."""
        self._step = record.step
        self._put_and_wait(lambda db: _write_step(db, record, time.time()))

    def complete(self, step: int, figures: Mapping[str, float | None]) -> None:
        """The line of metrics of a step, with what is known only after its weights were published."""
        first = "SELECT min(id) FROM metrics WHERE step = ?"
        self._put(lambda db: db.execute(f"UPDATE metrics SET figures = ? WHERE id = ({first})", (_json(figures), step)))

    def evaluation(self, step: int, figures: Mapping[str, float | None], detail: Mapping[str, Any]) -> None:
        """An evaluation after that step: its line of metrics, and what was measured. Returns when it is committed."""
        values = (time.time(), step, EVALUATION, _json(detail))

        def change(db: sqlite3.Connection) -> None:
            _write_metrics(db, step, figures)
            db.execute("INSERT INTO events (at, step, kind, detail) VALUES (?, ?, ?, ?)", values)

        self._put_and_wait(change)

    def checkpoint(self, step: int, name: str, digest: str) -> None:
        """It is complete, under that name."""
        at = time.time()
        self._put(
            lambda db: db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", (step, at, name, digest))
        )

    def checkpoints_removed(self, before_step: int) -> None:
        """Those of earlier steps are no longer there, so that nothing will be resumed from them."""
        self._put(lambda db: db.execute("DELETE FROM checkpoints WHERE step < ?", (before_step,)))

    def event(self, kind: str, detail: Mapping[str, Any]) -> None:
        values = (time.time(), self._step, kind, _json(detail))
        self._put(lambda db: db.execute("INSERT INTO events (at, step, kind, detail) VALUES (?, ?, ?, ?)", values))

    def take_back(self, last_step: int) -> None:
        """Steps after that one are as if they had never been taken; their groups are to be tried again.

        So are groups that were sampled with weights of these steps and wait: other weights will have their versions.
        """

        def change(db: sqlite3.Connection) -> None:
            for table, columns in (("groups", "place = NULL"), ("episodes", "staleness = NULL")):
                db.execute(
                    f"UPDATE {table} SET state = ?, step = NULL, {columns} WHERE state IN (?, ?) AND step > ?",
                    (RETRY, TRAINED, SETTLED, last_step),
                )
            newer = "SELECT task_id FROM episodes WHERE state = ? AND newest_version > ?"
            for table in ("groups", "episodes"):
                db.execute(
                    f"UPDATE {table} SET state = ? WHERE state = ? AND task_id IN ({newer})",
                    (RETRY, READY, READY, last_step),
                )
            for table in ("steps", "metrics", "checkpoints"):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (last_step,))
            db.execute("DELETE FROM events WHERE kind = ? AND step > ?", (EVALUATION, last_step))

        self._put(change)
        self._step = last_step

    def settle(self, step: int, below: int, beyond: Iterable[int]) -> None:
        """A checkpoint of a step that is not here says that these tasks need not run again, whatever they are here."""
        numbers = [(SETTLED, step, task_id, RUNNING, READY, RETRY) for task_id in beyond]

        def change(db: sqlite3.Connection) -> None:
            for table in ("groups", "episodes"):
                update = f"UPDATE {table} SET state = ?, step = ? WHERE task_id {{}} ? AND state IN (?, ?, ?)"
                db.execute(update.format("<"), (SETTLED, step, below, RUNNING, READY, RETRY))
                db.executemany(update.format("="), numbers)

        self._put(change)
        self._step = step

    def forget_tokens(self, before_step: int) -> None:
        """Remove the tokens of what was trained, or rejected, before that step, little by little; the rest stays."""

        def change(db: sqlite3.Connection) -> None:
            self._forget_before = max(self._forget_before, before_step)

        self._put(change)

    def stop_waiting(self) -> None:
        """The run is to end: from now on a full disk is not waited for."""
        with self._wake:
            self._waits_for_room = False
            self._wake.notify()

    def flush(self) -> None:
        """Returns when everything handed over so far is committed."""
        self._put_and_wait(lambda db: None)

    def close(self) -> None:
        """Write what is left. An error of the disk is not raised here: what was committed stays."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(self._patience_seconds)
        if not self._thread.is_alive():
            self._connection.close()

    def _put_and_wait(self, change: Callable[[sqlite3.Connection], Any]) -> None:
        committed: Future[None] = Future()
        self._put(change, committed)
        with waits.current().entered(self._what, self._patience_seconds, "store.full_disk_seconds"):
            committed.result()  # the thread has its own deadline, and ends every future when it ends

    def _what(self) -> str:
        """What whoever is in `_put_and_wait` waits for."""
        return f"waits for room on the disk of {self.path}" if self._is_full else f"waits until {self.path} is written"

    def _put(self, change: Callable[[sqlite3.Connection], Any], committed: Future[None] | None = None) -> None:
        with self._wake:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise StoreError(f"the run store {self.path} is closed")
            self._changes.append((change, committed))
            self._wake.notify()

    def _run(self) -> None:
        batch: list[tuple[Change, Future[None] | None]] = []
        tidy = False
        try:
            while (batch := self._next(wait=tidy)) or not tidy:
                if batch:
                    self._commit([change for change, _ in batch])
                for _, committed in batch:
                    if committed is not None:
                        committed.set_result(None)
                stepped = any(committed is not None for _, committed in batch)
                batch = []
                self._copy_log(LOG_BYTES if stepped else MOST_LOG_BYTES)
                tidy = not self._tidy_up()
                self.cpu_seconds = time.thread_time()
        except Exception as error:  # whoever waits, and whoever writes next, gets it
            self._give_up(error, batch)

    def _next(self, *, wait: bool) -> list[tuple[Change, Future[None] | None]]:
        """What has gathered. Empty = there is nothing now, or, after waiting for it, there will be nothing more."""
        with self._wake:
            while wait and not self._changes and not self._closed:
                self._wake.wait()
            return [self._changes.popleft() for _ in range(min(len(self._changes), MOST_AT_ONCE))]

    def _copy_log(self, most: int) -> None:
        """Bring what is committed into the file if the log is larger than that."""
        if self._log.stat().st_size > most:
            with suppress(sqlite3.OperationalError):  # no room, for example: it stays in the log, and is tried again
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _tidy_up(self) -> bool:
        """Forget some tokens, or shrink the file a little; whether there is more of it to do."""
        before = max(self._forget_before, _first_needed_step(self._connection, self._keep_tokens))
        if not before:
            return False
        old = _groups_with_tokens(self._connection, before)
        if old:
            self._commit([lambda db: _forget_tokens(db, old)])
            return True
        if _spare_share(self._connection) > SPARE_SHARE:
            self._commit([_shrink])
            return True
        return False

    def _commit(self, changes: list[Change]) -> None:
        """All of them in one transaction, once there is room for it."""
        full_since: float | None = None
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                for change in changes:
                    change(self._connection)
                self._connection.execute("COMMIT")
                break
            except sqlite3.OperationalError as error:
                with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                    self._connection.execute("ROLLBACK")
                if error.sqlite_errorcode & 0xFF not in FULL:
                    raise
                if full_since is None:
                    full_since, self._is_full = time.monotonic(), True
                    self._say(
                        f"no room to write {self.path} ({error}); the run waits for up to {self._patience_seconds:g} s"
                    )
                if not self._waits_for_room or time.monotonic() - full_since > self._patience_seconds:
                    raise
                self._wait_for_room()
        self._is_full = False
        if full_since is not None:
            seconds = time.monotonic() - full_since
            self._say(f"there is room again; the run goes on after {seconds:.0f} s")
            with suppress(StoreError):  # it is being closed
                self.event("disk full", {"seconds": seconds})

    def _wait_for_room(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._closed or not self._waits_for_room, RETRY_SECONDS)
            if self._closed:
                raise StoreError("it is closed while the disk is full")

    def _give_up(self, error: Exception, batch: list[tuple[Change, Future[None] | None]]) -> None:
        failure = StoreError(
            f"the run store {self.path} cannot be written: {error}; free some space or set output_dir, and start the "
            "run again: it goes on from what was committed"
        )
        with self._wake:
            self._failure = failure
            waiting = [*batch, *self._changes]
            self._changes.clear()
        for _, committed in waiting:
            if committed is not None:
                committed.set_exception(failure)


@dataclass(frozen=True)
class _GroupEnded:
    """The change that writes down a group with its episodes and rejections."""

    result: GroupResult
    state: str
    why: Rejection | None
    at: float
    step: int

    def __call__(self, db: sqlite3.Connection) -> None:
        result = self.result
        counts = _counts(result.episodes)
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
                _forget(db, ("episodes", *BLOBS), result.task_id)
            _write_episodes(db, result.task_id, result.episodes, counts)
            for rejection in result.rejections:
                self._reject(db, rejection)
        if self.why is not None and result.episodes:
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
                _json(result.digests),
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
    """Without numpy, which takes ten times as long for a few numbers."""
    if not rewards:
        return None, None
    mean = fmean(rewards)
    return mean, sqrt(fmean((reward - mean) ** 2 for reward in rewards))


class _Counts(NamedTuple):
    """Of an episode's tokens."""

    trained: int
    others: int
    oldest: int | None
    """The version of its oldest trained token; None if there is none."""
    newest: int | None


def _counts(episodes: Sequence[Episode]) -> list[_Counts]:
    """Of all episodes at once: one at a time would take longer than everything else that is written of them."""
    rows = [(sample, row) for sample, episode in enumerate(episodes) for row in episode.rows]
    if not rows:
        return [_Counts(0, 0, None, None)] * len(episodes)
    mask = np.concatenate([row.loss_mask for _, row in rows])
    samples = np.repeat([sample for sample, _ in rows], [len(row.loss_mask) for _, row in rows])
    tokens = np.bincount(samples, minlength=len(episodes)).tolist()
    samples, versions = samples[mask], np.concatenate([row.versions for _, row in rows])[mask]
    trained = np.bincount(samples, minlength=len(episodes)).tolist()
    oldest, newest = np.full(len(episodes), np.iinfo(np.int64).max), np.full(len(episodes), -1)
    np.minimum.at(oldest, samples, versions)
    np.maximum.at(newest, samples, versions)
    found = zip(tokens, trained, oldest.tolist(), newest.tolist(), strict=True)
    return [
        _Counts(own, every - own, first, last) if own else _Counts(0, every, None, None)
        for every, own, first, last in found
    ]


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
    texts = enumerate(map(conversation_text, episodes), last - len(episodes) + 1)
    db.executemany("INSERT INTO texts (rowid, body) VALUES (?, ?)", texts)
    conversations = [
        {name: value for name, value in vars(each).items() if name not in ELSEWHERE} | {"nodes": by_name(each.nodes)}
        for each in episodes
    ]
    previews = _json([_preview(each) for each in episodes])
    db.execute("INSERT INTO conversations VALUES (?, ?, ?)", (task_id, previews, pack(conversations)))
    rows = columns_of([each.rows for each in episodes])
    db.execute("INSERT INTO rows VALUES (?, ?, ?)", (task_id, pack(rows), checks_of(rows)))


def _write_step(db: sqlite3.Connection, record: StepRecord, at: float) -> None:
    batch = batch_digest((task_id, _stored_checks(db, task_id)) for task_id in record.batch)
    db.execute(
        "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)",
        (record.step, at, record.version, record.digest, batch, _json(record.account)),
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
    trained = [(task_id, pack(columns_of(rows))) for task_id, rows in record.trained.items()]
    db.executemany("INSERT OR REPLACE INTO trained VALUES (?, ?)", trained)
    _write_metrics(db, record.step, record.figures)


def _stored_checks(db: sqlite3.Connection, task_id: int) -> bytes:
    """The checksums of a group, as they were written with its tokens."""
    found = db.execute("SELECT checks FROM rows WHERE task_id = ?", (task_id,)).fetchone()
    return b"" if found is None else bytes(found["checks"])


def _write_metrics(db: sqlite3.Connection, step: int, figures: Mapping[str, float | None]) -> None:
    db.execute("INSERT INTO metrics (step, figures) VALUES (?, ?)", (step, _json(figures)))


def _first_needed_step(db: sqlite3.Connection, keep_tokens: int | None) -> int:
    """Tokens of the steps before it are not to be kept; 0 = those of all steps are."""
    if keep_tokens is None:
        return 0
    (newest,) = db.execute("SELECT max(step) FROM steps").fetchone()
    (resumable,) = db.execute("SELECT min(step) FROM checkpoints").fetchone()
    return 0 if newest is None or resumable is None else min(newest - keep_tokens, resumable) + 1


def _groups_with_tokens(db: sqlite3.Connection, before_step: int) -> list[int]:
    """Some that were trained or rejected before that step."""
    found = db.execute(
        "SELECT task_id FROM groups WHERE kept AND step < ? ORDER BY step LIMIT ?", (before_step, FORGET_GROUPS)
    )
    return [task_id for (task_id,) in found.fetchall()]


def _forget_tokens(db: sqlite3.Connection, groups: Sequence[int]) -> None:
    for task_id in groups:
        _forget(db, ("rows", "trained"), task_id)
        db.execute("UPDATE groups SET kept = 0 WHERE task_id = ?", (task_id,))


def _forget(db: sqlite3.Connection, tables: Sequence[str], task_id: int) -> None:
    for table in tables:
        db.execute(f"DELETE FROM {table} WHERE task_id = ?", (task_id,))


def _spare_share(db: sqlite3.Connection) -> float:
    """Of the file that holds nothing."""
    (empty,), (pages,) = (db.execute(f"PRAGMA {name}").fetchone() for name in ("freelist_count", "page_count"))
    return float(empty / max(1, pages))


def _shrink(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()  # a page for each row that is fetched


def _preview(episode: Episode) -> str:
    """The beginning of what the model said last, on one line."""
    said = [_text(message) for message in episode.messages if message.get("role") == "assistant"]
    return _storable(" ".join(said[-1].split())[:PREVIEW_CHARACTERS]) if said else ""


def conversation_text(episode: Episode) -> str:
    """What full-text search looks at: everything that was said in the tree, once."""
    of_tree = (message for node in episode.nodes for message in (*node.messages, node.message))
    return _storable("\n".join(dict.fromkeys(_text(message) for message in (*episode.messages, *of_tree))))


def _text(message: Mapping[str, Any]) -> str:
    """Everything that is said in a message, the calls of tools included."""
    content, thoughts, calls = (message.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    if isinstance(content, str) and not thoughts and not calls:  # nearly every message
        return content
    said = [content, thoughts]
    called = [call.get("function", call) for call in calls or [] if isinstance(call, dict)]
    said += [text for each in called for text in (each.get("name"), each.get("arguments"))]
    return "\n".join(each if isinstance(each, str) else _json(each) for each in said if each)


def _task_text(task: Mapping[str, Any]) -> str:
    """A task as JSON where that can express it; what it cannot is shown."""
    text = _json(task)
    return text if len(text) <= TASK_CHARACTERS else _json({"shortened": text[:TASK_CHARACTERS]})


def _json(value: Any) -> str:
    try:
        options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        return orjson.dumps(value, default=lambda each: shown(each, PREVIEW_CHARACTERS), option=options).decode()
    except (TypeError, ValueError):  # a number beyond 64 bits, half of a surrogate pair
        return json.dumps(value, default=lambda each: shown(each, PREVIEW_CHARACTERS), skipkeys=True)


def _storable(text: str) -> str:
    """SQLite takes no half of a surrogate pair, which a model may write."""
    return text.encode("utf-8", "replace").decode("utf-8")
