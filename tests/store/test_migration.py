"""An older file becomes the present one, step by step, and a migration that is killed begins again where it was."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from areal.store import schema
from areal.store.schema import STORE_FILE, StoreError, open_for_reading, open_for_writing

OLD = "CREATE TABLE notes (text TEXT NOT NULL); INSERT INTO notes VALUES ('kept');"
NEXT = "ALTER TABLE notes ADD COLUMN stars INTEGER NOT NULL DEFAULT 5; CREATE TABLE others (id INTEGER PRIMARY KEY);"
LAST = "UPDATE notes SET stars = stars + 1;"


def old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of version 1, where there are three by now."""
    path = tmp_path / STORE_FILE
    monkeypatch.setattr(schema, "MIGRATIONS", (OLD,))
    open_for_writing(path).close()
    monkeypatch.setattr(schema, "MIGRATIONS", (OLD, NEXT, LAST))
    return path


def content(path: Path) -> tuple[int, list[tuple[object, ...]]]:
    with sqlite3.connect(path) as db:
        return db.execute("PRAGMA user_version").fetchone()[0], db.execute("SELECT * FROM notes").fetchall()


def test_an_old_file_goes_up_and_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old_file(tmp_path, monkeypatch)
    open_for_writing(path).close()
    open_for_writing(path).close()
    assert content(path) == (3, [("kept", 6)])


def test_a_reader_of_an_old_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old_file(tmp_path, monkeypatch)
    with pytest.raises(StoreError, match="has version 1, this areal knows 3; resume the run once to convert it"):
        open_for_reading(path)


def test_a_migration_that_fails_leaves_the_version_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old_file(tmp_path, monkeypatch)
    monkeypatch.setattr(schema, "MIGRATIONS", (OLD, NEXT, f"{LAST} CREATE TABLE others (id INTEGER);"))
    with pytest.raises(StoreError, match="already exists"):
        open_for_writing(path)
    assert content(path) == (2, [("kept", 5)])
    monkeypatch.setattr(schema, "MIGRATIONS", (OLD, NEXT, LAST))
    open_for_writing(path).close()
    assert content(path) == (3, [("kept", 6)])


@pytest.mark.slow
def test_a_migration_that_is_killed_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed by SQL of its last part, after that part has changed the file."""
    path = old_file(tmp_path, monkeypatch)
    script = (
        "import os, signal, sqlite3, sys\n"
        "from pathlib import Path\n"
        "from areal.store import schema\n"
        "schema.MIGRATIONS = tuple(sys.argv[2:])\n"
        "connect = sqlite3.connect\n"
        "def killing(*args, **options):\n"
        "    db = connect(*args, **options)\n"
        "    db.create_function('die', 0, lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "    return db\n"
        "sqlite3.connect = killing\n"
        "schema.open_for_writing(Path(sys.argv[1]))\n"
    )
    words = [sys.executable, "-c", script, str(path), OLD, NEXT, f"{LAST} SELECT die();"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(words, timeout=60, env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == -signal.SIGKILL
    assert content(path) == (2, [("kept", 5)])
    open_for_writing(path).close()
    assert content(path) == (3, [("kept", 6)])
