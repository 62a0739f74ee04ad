"""Writes down a run while it goes on, on one thread that no model call waits for.

Callers hand over what happened and go on; the thread packs it and commits what has gathered in one transaction. Only a
step waits until it is committed, together with all that was handed over before it: from then on its groups are trained,
whatever is killed. A full disk does not lose anything: the thread keeps what it has, says so once, and tries again
until there is room or its patience ends.

Tokens that are not to be kept are removed a few groups at a time, between transactions, so that no step waits for it.
What a resumed run may need stays: the groups that are not trained yet, and those of steps after the oldest checkpoint.

Everything a caller hands over must not be changed afterwards.
"""

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal.api.messages import GroupResult, Rejection
from areal.store.records import (
    GroupEnded,
    StepRecord,
    forget,
    task_text,
    to_json,
    write_metrics,
    write_step,
    write_trained,
)
from areal.store.schema import (
    DAMAGE,
    EVALUATION,
    READY,
    REJECTED,
    RETRY,
    RUNNING,
    SETTLED,
    STORE_FILE,
    TRAINED,
    StoreError,
    StoreGone,
    open_for_writing,
    unreadable,
)
from areal.utils import waits
from areal.utils.closing import Closing

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
FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""How SQLite reports that a disk takes nothing more, by the lowest byte of its codes."""

Change = Callable[[sqlite3.Connection], None]


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
        self._step = self._last_step()
        self._thread = threading.Thread(target=self._run, name="run store", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Changes that were handed over and are not being written yet."""
        return len(self._changes)

    def _last_step(self) -> int:
        try:
            return int(self._connection.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0])
        except DAMAGE as error:
            self._connection.close()
            raise unreadable(self.path, error) from error

    def session(self, first_step: int, machine: Mapping[str, Any]) -> None:
        """The run begins, or goes on. Groups that ran when it ended are to be tried again."""
        began = time.time()

        def change(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO sessions (began, first_step, machine) VALUES (?, ?, ?)",
                (began, first_step, to_json(machine)),
            )
            db.execute("UPDATE groups SET state = ? WHERE state = ?", (RETRY, RUNNING))

        self._put(change)

    def set_meta(self, values: Mapping[str, Any]) -> None:
        pairs = [(name, to_json(value)) for name, value in values.items()]
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
                (task_id, RUNNING, began, version, task_text(task)),
            )

        self._put(change)

    def ready(self, result: GroupResult) -> None:
        """A group has ended and waits to be trained."""
        self._put(GroupEnded(result, READY, None, time.time(), self._step))

    def rejected(self, result: GroupResult, why: Rejection) -> None:
        """A group will not be trained: one that has just ended, or one that was ready."""
        self._put(GroupEnded(result, REJECTED, why, time.time(), self._step))

    def step(self, record: StepRecord) -> None:
        """Returns when the step is committed; raises StoreError if it cannot be.

        What the trainer computed for its tokens follows, and nobody waits for it: nothing but a reader needs it.
        """
        self._step = record.step
        self._put_and_wait(lambda db: write_step(db, record, time.time()))
        self._put(lambda db: write_trained(db, record))

    def complete(self, step: int, figures: Mapping[str, float | None]) -> None:
        """The line of metrics of a step, with what is known only after its weights were published."""
        first = "SELECT min(id) FROM metrics WHERE step = ?"
        self._put(
            lambda db: db.execute(f"UPDATE metrics SET figures = ? WHERE id = ({first})", (to_json(figures), step))
        )

    def evaluation(self, step: int, figures: Mapping[str, float | None], detail: Mapping[str, Any]) -> None:
        """An evaluation after that step: its line of metrics, and what was measured. Returns when it is committed."""
        values = (time.time(), step, EVALUATION, to_json(detail))

        def change(db: sqlite3.Connection) -> None:
            write_metrics(db, step, figures)
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
        values = (time.time(), self._step, kind, to_json(detail))
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
        self.path.stat()  # SQLite goes on with a file that was removed, and all of it is lost
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
        if self.path.exists():
            failure = StoreError(
                f"the run store {self.path} cannot be written: {error}; free some space or set output_dir, and start "
                "the run again: it goes on from what was committed"
            )
        else:
            failure = StoreGone(
                f"the run store {self.path} was removed or moved while the run wrote to it; put its files back and "
                "start the run again, or start it without them: it goes on from its newest checkpoint, or from the "
                "start if it has none"
            )
        with self._wake:
            self._failure = failure
            waiting = [*batch, *self._changes]
            self._changes.clear()
        for _, committed in waiting:
            if committed is not None:
                committed.set_exception(failure)


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
        forget(db, ("rows", "trained"), task_id)
        db.execute("UPDATE groups SET kept = 0 WHERE task_id = ?", (task_id,))


def _spare_share(db: sqlite3.Connection) -> float:
    """Of the file that holds nothing."""
    (empty,), (pages,) = (db.execute(f"PRAGMA {name}").fetchone() for name in ("freelist_count", "page_count"))
    return float(empty / max(1, pages))


def _shrink(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()  # a page for each row that is fetched
