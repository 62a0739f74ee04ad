"""The tables of a run store, and how an older file becomes the present one.

    meta         what holds for the whole run, by name
    sessions     each time that the run was started: when, where, with which libraries
    groups       a task and what became of it: running, ready, trained (at which step, in which place), rejected
    episodes     one sample of a group: the columns that people filter by and nothing else, so that a scan is fast
    conversations
                 what was said in a group, its trees and what else is known of its episodes (blob)
    rows         its tokens as they are trained (blob), and a checksum of each field
    trained      what the trainer computed for its tokens (blob)
    texts        full-text index over the conversation of each episode
    rejections   why an episode yielded nothing, with the traceback
    steps        each step of training: digests of its batch and of the weights it led to, and the totals of the run
    metrics      the lines of metrics.jsonl; a step has one, an evaluation another
    checkpoints  those that are complete
    events       what else happened: versions published, deaths, restarts, evaluations

Times are seconds since 1970. A file is as new as its `user_version`; `MIGRATIONS[n]` leads from version n to n + 1.
"""

import os
import sqlite3
import zlib
from pathlib import Path

from areal.api.errors import ArealError
from areal.utils.shorten import first_line

STORE_FILE = "run.db"
RUNNING, READY, TRAINED, REJECTED, RETRY = "running", "ready", "trained", "rejected", "retry"
"""States of a group. To be tried again is one that ran when the driver ended, or whose step is taken back."""
SETTLED = "settled"
"""A checkpoint knows that it was trained or rejected; the store has lost which."""
STATES = (RUNNING, READY, TRAINED, REJECTED, RETRY, SETTLED)
EVALUATION = "evaluation"
"""The kind of event that an evaluation is."""
PUBLISHED = "published"
"""The same of a version that the engines were given."""
FAILED = "failed"
"""The same of an error that ended a session of the run."""
BUSY_SECONDS = 30.0
"""How long a statement waits for another process: only migrations hold the file longer than a moment."""

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    began REAL NOT NULL,
    first_step INTEGER NOT NULL,
    machine TEXT NOT NULL
) STRICT;

CREATE TABLE groups (
    task_id INTEGER PRIMARY KEY,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 1,
    began REAL NOT NULL,
    ended REAL,
    began_version INTEGER NOT NULL,
    oldest_version INTEGER,
    step INTEGER,
    place INTEGER,
    reason TEXT,
    episodes INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0,
    reward REAL,
    reward_spread REAL,
    digests TEXT NOT NULL DEFAULT '{}',
    kept INTEGER NOT NULL DEFAULT 1,
    task TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX groups_by_state ON groups (state, oldest_version);
CREATE INDEX groups_by_step ON groups (step, place);
CREATE INDEX groups_with_tokens ON groups (step) WHERE kept;

CREATE TABLE episodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    task_id INTEGER NOT NULL REFERENCES groups (task_id),
    sample INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    step INTEGER,
    reward REAL NOT NULL,
    tokens INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    seconds REAL NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    staleness INTEGER,
    truncated INTEGER NOT NULL,
    UNIQUE (task_id, sample)
) STRICT;
CREATE INDEX episodes_by_step ON episodes (step);

-- A blob for each group: one for each episode costs several times the processor time and twice the room.
CREATE TABLE conversations (
    task_id INTEGER PRIMARY KEY REFERENCES groups (task_id),
    previews TEXT NOT NULL,
    data BLOB NOT NULL
) STRICT;
CREATE TABLE rows (
    task_id INTEGER PRIMARY KEY REFERENCES groups (task_id),
    data BLOB NOT NULL,
    checks BLOB NOT NULL
) STRICT;
CREATE TABLE trained (
    task_id INTEGER PRIMARY KEY REFERENCES groups (task_id),
    data BLOB NOT NULL
) STRICT;

-- Without a copy of the text. What is deleted elsewhere stays here, under a number that no other episode will have.
CREATE VIRTUAL TABLE texts USING fts5 (body, content = '', columnsize = 0, tokenize = 'unicode61');

CREATE TABLE rejections (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    task_id INTEGER NOT NULL,
    step INTEGER NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    trace TEXT NOT NULL
) STRICT;
CREATE INDEX rejections_by_reason ON rejections (reason, step);

CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    version INTEGER NOT NULL,
    digest TEXT NOT NULL,
    batch TEXT NOT NULL,
    account TEXT NOT NULL
) STRICT;

CREATE TABLE metrics (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, figures TEXT NOT NULL) STRICT;
CREATE INDEX metrics_by_step ON metrics (step);

CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, at REAL NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL) STRICT;

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    step INTEGER NOT NULL,
    kind TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_kind ON events (kind, step);
"""

MIGRATIONS = (_TABLES,)


DAMAGE = (sqlite3.DatabaseError, zlib.error)
"""What reading raises if the bytes of a file are not what was written."""


class StoreError(ArealError):
    """A run store cannot be read or written."""


class StoreGone(StoreError):
    """Its file was removed while a run wrote to it, with all that it kept."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Make the file or bring it to the present version. What is committed survives a killed process.

    After a power failure the last commits may be missing, never half of one.
    """
    connection = _connect(path.resolve().as_uri(), path)
    try:
        connection.execute(
            "PRAGMA auto_vacuum = INCREMENTAL"
        )  # before the first table, so that pruning shrinks the file
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = OFF")  # some builds overwrite what is deleted, which costs as much
        connection.execute("PRAGMA journal_size_limit = 0")  # the log is as large as what is in it
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # the writer copies it to the file when no step waits
        connection.execute("PRAGMA foreign_keys = ON")
        _migrate(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise unreadable(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path, *, at_rest: bool = False) -> sqlite3.Connection:
    """Raises StoreError if there is no store, or one of another version.

    SQLite makes two files beside one that may be written to meanwhile, and a reader leaves them there. With `at_rest`
    there is nobody to share them with, unless a log of changes says that a run goes on, or was killed. Where nothing
    may be written, they cannot be made.
    """
    if not path.is_file():
        raise StoreError(f"there is no run store at {path}; name the directory of a run, which has a {STORE_FILE}")
    at_rest = at_rest or not os.access(path.parent, os.W_OK)
    changing = not at_rest or path.with_name(f"{path.name}-wal").exists()
    connection = _connect(f"{path.resolve().as_uri()}?mode=ro{'' if changing else '&immutable=1'}", path)
    try:
        found = _version(connection)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise unreadable(path, error) from error
    if found != len(MIGRATIONS):
        connection.close()
        raise StoreError(_wrong_version(path, found))
    return connection


def _connect(uri: str, path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise unreadable(path, error) from error
    connection.row_factory = sqlite3.Row
    return connection


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Each step in one transaction with its number: a killed migration begins again where it was."""
    if _version(connection) > len(MIGRATIONS):
        raise StoreError(_wrong_version(path, _version(connection)))
    for number in range(_version(connection), len(MIGRATIONS)):
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _wrong_version(path: Path, found: int) -> str:
    remedy = "install a newer one" if found > len(MIGRATIONS) else "resume the run once to convert it"
    return f"the run store {path} has version {found}, this areal knows {len(MIGRATIONS)}; {remedy}"


def unreadable(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"the run store {path} cannot be read: {first_line(error)}; put a copy back, or choose another trial_name"
    )
