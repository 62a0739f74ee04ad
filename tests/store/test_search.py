"""Episodes are found by what people type, in pages; nothing that is typed can do anything else."""

import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from areal.api.errors import RejectReason
from areal.api.messages import Episode, GroupResult, Rejection
from areal.store.filters import FilterError, parse_filter
from areal.store.schema import STORE_FILE
from areal.store.search import EpisodeLine, StoreSearch
from areal.store.writer import StoreWriter
from tests.store.test_store import group, row, step_of

STEPS, GROUPS = 10, 3
"""Three groups for each step: one is trained, one is rejected, one waits."""


def random_episode(draw: random.Random, version: int) -> Episode:
    tokens = draw.choice([4, 8, 12])
    text = draw.choice(["the parcel is lost", "the parcel has come", "Grüße, 世界", 'it\'s "so" AND so'])
    said = [{"role": "user", "content": "where?"}, {"role": "assistant", "content": text}]
    drawn = replace(row(tokens, version), truncated=draw.random() < 0.3)
    return Episode([drawn], draw.choice([0.0, 0.5, 1.0]), said, calls=draw.randint(1, 3), seconds=draw.random())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    draw = random.Random(1)
    with StoreWriter(path) as store:
        for step in range(1, STEPS + 1):
            for task_id in range(step * GROUPS, step * GROUPS + GROUPS):
                store.started(task_id, step - 1, {"question": "where?"})
                made = group(task_id, *(random_episode(draw, max(0, step - 1 - draw.randint(0, 2))) for _ in range(4)))
                store.ready(made)
                if task_id % GROUPS == 1:
                    store.rejected(made, Rejection(RejectReason.STALE, "too old", f"Traceback {step}"))
            store.step(step_of(step, step * GROUPS))
        failed = Rejection(RejectReason.AGENT_ERROR, "it raised", "Traceback: here")
        store.rejected(GroupResult(999, [], [failed, replace(failed, trace="")], {}), failed)
    return path


@pytest.fixture
def store(directory: Path) -> Iterator[StoreSearch]:
    with StoreSearch(directory) as opened:
        yield opened


def everything(store: StoreSearch) -> list[EpisodeLine]:
    return store.page(limit=1000).episodes


def pages(store: StoreSearch, line: str, order: str, limit: int = 7) -> list[EpisodeLine]:
    found, place = [], None
    while True:
        page = store.page(parse_filter(line), order, place, limit)
        found += page.episodes
        if page.next is None:
            return found
        assert len(page.episodes) == limit
        place = page.next


@pytest.mark.parametrize(
    ("line", "holds"),
    [
        ("", lambda each: True),
        ("reward<0.5", lambda each: each.reward < 0.5),
        ("reward>=.5 tokens>2", lambda each: each.reward >= 0.5 and each.tokens > 2),
        ("step:3-5", lambda each: each.step in (3, 4, 5)),
        ("step:8..", lambda each: each.step is not None and each.step >= 8),
        ("step=..2", lambda each: each.step is not None and each.step <= 2),
        ("reward:-1-0.5", lambda each: each.reward <= 0.5),
        ("step:2,4", lambda each: each.step in (2, 4)),
        ("step!=2", lambda each: each.step != 2),
        ("truncated", lambda each: each.truncated),
        ("truncated:no", lambda each: not each.truncated),
        ("state:trained,ready", lambda each: each.state in ("trained", "ready")),
        ("State!=trained", lambda each: each.state != "trained"),
        ("reason:stale", lambda each: each.reason == "stale"),
        ("reason!=stale", lambda each: each.reason != "stale"),
        ("turns>1 seconds<0.5", lambda each: each.calls > 1 and each.seconds < 0.5),
        ("staleness>0", lambda each: each.staleness is not None and each.staleness > 0),
        ("version<2", lambda each: each.oldest_version < 2),
        ("group:3", lambda each: each.task_id == 3),
        ("prompt:2 sample:0", lambda each: each.prompt_tokens == 2 and each.sample == 0),
        ('"parcel is"', lambda each: "parcel is" in each.preview),
        ('"THE Parcel" reward>0 "come"', lambda each: "parcel has come" in each.preview and each.reward > 0),
        ('"gruße"', lambda each: "Grüße" in each.preview),
        ('"so AND so"', lambda each: "so" in each.preview),
        ("reward<1e999 tokens<99999999999999999999999", lambda each: True),
    ],
)
def test_a_line_finds_what_holds(store: StoreSearch, line: str, holds: Callable[[EpisodeLine], bool]) -> None:
    expected = {each.id for each in everything(store) if holds(each)}
    assert {each.id for each in pages(store, line, "-id")} == expected
    assert store.count(parse_filter(line)) == len(expected)


@pytest.mark.parametrize(
    "order", ["id", "-id", "reward", "-reward", "step", "-step", "-staleness", "tokens", "-seconds"]
)
@pytest.mark.parametrize("line", ["", "reward>0", '"parcel"', "state:ready"])
def test_pages_are_the_whole_in_its_order(store: StoreSearch, order: str, line: str) -> None:
    name, down = order.removeprefix("-"), order.startswith("-")
    whole = [each for each in everything(store) if each.id in {found.id for found in pages(store, line, "-id")}]

    def key(each: EpisodeLine) -> tuple[bool, float, int]:
        value, sign = getattr(each, name), -1 if down else 1
        return value is None, sign * (value or 0), sign * each.id

    assert pages(store, line, order) == sorted(whole, key=key)


def test_a_page_is_not_moved_by_what_is_added(directory: Path, store: StoreSearch, tmp_path: Path) -> None:
    (tmp_path / STORE_FILE).write_bytes((directory / STORE_FILE).read_bytes())
    with StoreSearch(tmp_path) as copy, StoreWriter(tmp_path) as writer:
        first = copy.page(limit=5)
        writer.ready(group(5000))
        writer.flush()
        second = copy.page(after=first.next, limit=5)
        assert [each.id for each in first.episodes + second.episodes] == [each.id for each in everything(store)[:10]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rewrad<0.5", "there is no column 'rewrad'; did you mean reward?"),
        ("colour:red", "there is no column 'colour'; there are id, group,"),
        ("reward<high", "reward must be compared with a number, got 'high'; write reward<2 or reward:2-5"),
        ("reward<nan", "compared with a number"),
        ("reward<", "must be compared with something"),
        ("reward", "reward must be compared with something; write reward<2"),
        ("reward<1,2", "compares with one number"),
        ("step:5-3", "a range must go up, got '5-3'; write 3-5"),
        ("step:..", "a range is 300-500, 300.. or ..500, got '..'"),
        ("state:traind", "there is no state 'traind'; did you mean trained?"),
        ("state<trained", "state is a word, so < cannot compare it"),
        ("truncated:maybe", "there is no truncated 'maybe'; there are yes, true,"),
        ("trained", "'trained' is no filter; write state:trained"),
        ("sorry", "'sorry' is no filter; write \"sorry\" for text"),
        ('"half', "text must be in two double quotes"),
        ('"?!"', "must have a letter or a digit"),
        ('""', "must have a letter or a digit"),
        ("x" * 3000, "a filter may have 2000 characters, got 3000"),
        ('"a" ' * 51, "a filter may have 50 words, got 51"),
    ],
)
def test_a_wrong_word_is_refused_with_the_right_one(line: str, message: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse_filter(line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


HOSTILE = [
    "1); DROP TABLE episodes; --",
    "reward<0.5;DROP TABLE episodes",
    "id:1/**/OR/**/1=1",
    "state:trained'--",
    '"a" OR "b"',
    '"a* NEAR(b, 2) ^c {body}: d + NOT"',
    '"body : the"',
    '"\0the parcel"',
    '"\ud800 the"',
    '"' + "the " * 450 + '"',
    '"' + "x" * 1_000_000 + '"',
    '"a"' * 50,
    "group:" + ",".join(["1"] * 900),
    "group:" + "9" * 1900,
    "reward:" + "-" * 1900,
    "reward<" + "1," * 900 + "1",
    "reward:" + "2" * 900 + "-" + "1" * 900,
    "\udcff<\udcff",
    "reward<٣",
    "\n\t\v",
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_lines_find_something_or_are_refused(store: StoreSearch, line: str) -> None:
    try:
        chosen = parse_filter(line)
    except FilterError as error:
        if len(str(error)) > 1000:
            raise
        return
    assert store.count(chosen) >= len(store.page(chosen).episodes) >= 0
    assert store.count() == STEPS * GROUPS * 4


def test_random_lines_find_something_or_are_refused(store: StoreSearch) -> None:
    draw = random.Random(2)
    pieces = [
        *"\"<>=!:-.,*^(){}+'\\;\0 ",
        "reward",
        "step",
        "state",
        "trained",
        "NOT",
        "the",
        "0.5",
        "1e5",
        "é",
        "\ud800",
    ]
    refused = 0
    for _ in range(2000):
        line = "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        try:
            store.count(parse_filter(line))
        except FilterError:
            refused += 1
    assert refused < 2000


@pytest.mark.parametrize("order", ["", "rewrad", "state", "-reason", "id; DROP TABLE episodes", "--id"])
def test_an_order_that_there_is_not_is_refused(store: StoreSearch, order: str) -> None:
    with pytest.raises(FilterError):
        store.page(order=order)


@pytest.mark.parametrize("name", ["reward", "tokens", "seconds", "staleness", "truncated"])
@pytest.mark.parametrize("bins", [1, 3, 40])
def test_a_histogram_counts_every_episode_once_in_its_bin(store: StoreSearch, name: str, bins: int) -> None:
    values = [getattr(each, name) for each in everything(store) if each.reward < 1]
    drawn = store.histogram(name, parse_filter("reward<1"), bins)
    known = [float(value) for value in values if value is not None]
    assert drawn.unknown == len(values) - len(known)
    assert len(drawn.counts) == len(drawn.edges) - 1 <= bins
    for low, high, count in zip(drawn.edges, drawn.edges[1:], drawn.counts, strict=False):
        last = high == drawn.edges[-1]
        assert count == sum(low <= value < high or (last and value >= high) for value in known)


def test_a_histogram_of_nothing_is_empty(store: StoreSearch) -> None:
    assert store.histogram("reward", parse_filter("reward>5")).counts == []
    with pytest.raises(FilterError, match="a column of numbers is needed"):
        store.histogram("state")


def test_a_curve_is_of_what_was_trained_unless_states_are_named(store: StoreSearch) -> None:
    for line, state in (("", "trained"), ("state:rejected", "rejected")):
        curve = store.curve("reward", parse_filter(line))
        assert [point.step for point in curve] == list(
            range(1 if state == "trained" else 0, 11 if state == "trained" else 10)
        )
        for point in curve:
            rewards = [each.reward for each in everything(store) if each.step == point.step and each.state == state]
            assert (point.episodes, point.least, point.most) == (len(rewards), min(rewards), max(rewards))
            assert point.mean == pytest.approx(sum(rewards) / len(rewards))


def test_groups_of_a_step_are_its_batch_and_what_was_rejected_in_it(store: StoreSearch) -> None:
    trained, rejected = store.groups(4)
    assert (trained.task_id, trained.state, trained.place, trained.episodes) == (12, "trained", 0, 4)
    assert (rejected.task_id, rejected.state, rejected.reason) == (16, "rejected", "stale")
    assert trained.kept
    assert trained.task == '{"question":"where?"}'


def test_rejections_have_their_course_and_one_traceback(store: StoreSearch) -> None:
    stale, failed = store.rejection_kinds()
    assert (stale.reason, stale.count, stale.by_step) == ("stale", 4 * STEPS, [(step, 4) for step in range(STEPS)])
    assert stale.trace == f"Traceback {STEPS}"
    assert (failed.reason, failed.count, failed.trace, failed.detail) == (
        "agent_error",
        2,
        "Traceback: here",
        "it raised",
    )


def test_a_trajectory_is_everything_that_is_known_of_an_episode(store: StoreSearch) -> None:
    line = pages(store, "state:trained", "id")[0]
    found = store.trajectory(line.id)
    assert found.line == line
    assert found.group.task_id == line.task_id
    assert found.episode.trained_tokens == line.tokens
    assert found.episode.messages[-1]["content"] == line.preview
    with pytest.raises(KeyError):
        store.trajectory(10**6)


def test_a_reader_cannot_write(store: StoreSearch) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        store._db.execute("DELETE FROM episodes")
