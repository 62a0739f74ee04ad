"""A stored batch that was altered is told from one that was not, down to the group and the field."""

import dataclasses
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_store import group, row, step_of

from areal.api.messages import Row
from areal.store.blobs import SAMPLE, columns_of, episodes_of, pack, unpack
from areal.store.checks import FIELDS, checks_of, differing_fields
from areal.store.reader import Altered, StoreReader
from areal.store.schema import STORE_FILE
from areal.store.writer import StoreWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A store with one step of the groups 2 and 0, in this order."""
    with StoreWriter(tmp_path) as store:
        for task_id in range(3):
            store.ready(group(task_id))
        store.step(step_of(1, 2, 0))
    return tmp_path


def altered(run: Path, statement: str, *values: Any) -> list[Altered]:
    with sqlite3.connect(run / STORE_FILE) as db:
        assert db.execute(statement, values).rowcount == 1
    with StoreReader(run) as reader:
        return reader.altered(1)


def test_every_field_of_a_row_has_a_checksum() -> None:
    assert {field.name for field in dataclasses.fields(Row)} | {SAMPLE} == set(FIELDS)


def test_what_comes_back_as_it_was_written_is_not_altered(run: Path) -> None:
    with StoreReader(run) as reader:
        assert reader.altered(1) == []


CHANGES: dict[str, Callable[[Row], Any]] = {
    "logprobs": lambda row: np.nextafter(row.logprobs, np.float32(1)),
    "input_ids": lambda row: row.input_ids[::-1],
    "versions": lambda row: row.versions.astype(np.int64),
    "reward": lambda row: row.reward + 1e-9,
    "images": lambda row: [b"another"],
}


def stored_rows(run: Path, task_id: int) -> dict[int, list[Row]]:
    with sqlite3.connect(run / STORE_FILE) as db:
        (data,) = db.execute("SELECT data FROM rows WHERE task_id = ?", (task_id,)).fetchone()
    return episodes_of(unpack(data), Row)


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_was_altered_is_named_with_its_task(run: Path, name: str) -> None:
    first, (changed,) = stored_rows(run, 0).values()
    changed = dataclasses.replace(changed, **{name: CHANGES[name](changed)})
    data = pack(columns_of([first, [changed]]))
    assert altered(run, "UPDATE rows SET data = ? WHERE task_id = 0", data) == [Altered(name, 0)]


def test_rows_that_were_given_to_another_episode_are_named(run: Path) -> None:
    first, second = stored_rows(run, 0).values()
    data = pack(columns_of([[*first, *second], []]))
    assert altered(run, "UPDATE rows SET data = ? WHERE task_id = 0", data) == [Altered(SAMPLE, 0)]


@pytest.mark.parametrize("data", [b"\x00", pack(5), pack({"input_ids": 5})], ids=["bytes", "a number", "no columns"])
def test_rows_that_cannot_be_read_are_named(run: Path, data: bytes) -> None:
    assert altered(run, "UPDATE rows SET data = ? WHERE task_id = 0", data) == [Altered("rows", 0)]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE groups SET place = 2 WHERE task_id = 2",
        "UPDATE groups SET step = 7 WHERE task_id = 2",
        "UPDATE groups SET step = 1, place = 3, state = 'trained' WHERE task_id = 1",
        "DELETE FROM rows WHERE task_id = 0",
    ],
    ids=["order", "less", "more", "without tokens"],
)
def test_other_groups_or_another_order_are_named(run: Path, statement: str) -> None:
    assert altered(run, statement) == [Altered("groups")]


def test_a_field_that_is_newer_than_the_store_has_no_checksum() -> None:
    checks = checks_of(columns_of([[row()]]))
    assert differing_fields(checks, checks[:-4]) == []
