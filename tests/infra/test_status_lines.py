"""Sentences about what parts of a run do, and what is said of an event loop that gives no answer."""

import asyncio
import threading
import time

import pytest

from areal.api.messages import Doing
from areal.infra.loop_thread import LoopThread
from areal.infra.status import WatchedLoop, describe, doing_of, line_of_task, line_of_thread, sentence, together
from areal.infra.workflow_context import WorkflowContext, enter
from areal.utils.waits import Waits


def test_who_waits_for_nothing_is_not_told_of() -> None:
    assert doing_of("the trainer", Waits()) is None


def test_a_part_is_told_of_by_what_it_waits_for_in_particular() -> None:
    part = Waits()
    with part.entered("runs its own code", 60.0, "rollout.agent.timeout_seconds"):
        alone = doing_of("task 7", part)
        with part.entered("waits for the model", 3600.0, "proxy.limits.call_timeout_seconds"):
            inside = doing_of("task 7", part)
    assert alone is not None
    assert inside is not None
    assert alone.what == "runs its own code"
    assert inside.what == "waits for the model"
    # The deadline is the one that comes first, whoever has set it.
    assert inside.limit == "rollout.agent.timeout_seconds=60"
    assert inside.left_seconds is not None
    assert inside.left_seconds <= 60


def test_what_is_waited_for_together_is_told_together() -> None:
    part = Waits()
    with part.entered("publishes"), part.entered("waits for engine 0"), part.entered("waits for engine 1"):
        doing = doing_of("the trainer", part)
    assert doing is not None
    assert [sentence(each) for each in (doing, *doing.inside)] == [
        "the trainer waits for engine 0, for 0 s",
        "and waits for engine 1, for 0 s",
    ]


def test_of_those_that_do_the_same_the_one_that_has_done_it_for_longest_is_named() -> None:
    doings = [Doing(f"task {number}", "waits", float(number)) for number in range(3)]
    assert [sentence(each) for each in together([*doings, Doing("task 9", "runs", 1.0)])] == [
        "task 2 waits, for 2 s; so do 2 others",
        "task 9 runs, for 1 s",
    ]


def test_the_end_is_a_time_of_day_and_its_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    noon = time.mktime((2026, 11, 17, 12, 0, 0, 0, 0, -1))
    monkeypatch.setattr(time, "time", lambda: noon)
    assert (
        sentence(Doing("it", "waits", 41.2, 70.0, "a.b=300")) == "it waits, for 41 s, until 12:01:10 at most (a.b=300)"
    )
    assert sentence(Doing("it", "waits", 41.2, 90_000.0)) == "it waits, for 41 s, until 2026-11-18 13:00 at most"


def test_lines_fit_the_terminal_and_parts_are_below_what_they_are_part_of() -> None:
    inside = [Doing("task 1", "waits for " + "many words " * 20, 3.0)]
    lines = describe([Doing("rollout worker 0", "runs", inside=inside)], width=80)
    assert lines[0] == "rollout worker 0 runs"
    assert lines[1].startswith("  task 1 waits")
    assert lines[2].startswith("      ")
    assert max(map(len, lines)) <= 80


def test_names_cannot_control_the_terminal() -> None:
    assert sentence(Doing("task\x1b[31m", "waits\nfor ever")) == "task�[31m waits�for ever"


@pytest.fixture
def loop() -> LoopThread:
    return LoopThread("watched")


async def nothing() -> list[Doing]:
    return [Doing("it", "runs")]


async def test_code_that_blocks_an_event_loop_is_named_with_its_line_and_task(loop: LoopThread) -> None:
    released, blocks = threading.Event(), threading.Event()

    async def episode() -> None:
        with enter(WorkflowContext(task_id=7)):
            blocks.set()
            released.wait(60)

    watched = WatchedLoop("its event loop", loop.loop, loop.thread_id, lambda: 41.0)
    try:
        assert [each.what for each in await watched.ask(nothing)] == ["runs"]
        future = loop.begin(episode())
        assert blocks.wait(20)
        (held,) = await watched.ask(nothing)
    finally:
        released.set()
    assert held.what.startswith("is blocked at ")
    assert "test_status_lines.py:" in held.what
    assert "in episode: released.wait(60) (task 7); all other episodes there wait" in held.what
    assert held.seconds == 41.0
    future.result(20)
    assert [each.what for each in await watched.ask(nothing)] == ["runs"]
    loop.close()


async def test_the_line_of_a_task_is_the_innermost_of_the_users_code() -> None:
    async def tool() -> None:
        await asyncio.gather(asyncio.Event().wait())

    task = asyncio.create_task(tool())
    await asyncio.sleep(0)
    assert line_of_task(task).endswith("in tool")
    assert "test_status_lines.py:" in line_of_task(task)
    task.cancel()


def test_the_line_of_a_thread_is_the_innermost_that_is_not_of_a_library() -> None:
    released, begun = threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        released.wait(60)

    thread = threading.Thread(target=compute)
    thread.start()
    assert begun.wait(20)
    line = line_of_thread(thread.ident or 0)
    released.set()
    thread.join(20)
    assert line.endswith("in compute")
