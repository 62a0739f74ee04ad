"""Code that holds an event loop is found while it holds it. Here it holds it until it is found."""

import asyncio
import importlib
import os
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal.api.messages import Stall
from areal.infra import workflow_context
from areal.infra.blocking_calls import remedy_for
from areal.infra.stalls import (
    Callback,
    Clocks,
    LoopBlocked,
    StallLog,
    StallWatch,
    describe_ended,
    describe_ongoing,
    running_callback,
    starvation_clock,
)
from areal.infra.workflow_context import WorkflowContext

SECONDS = 0.05
DEADLINE_SECONDS = 20


@dataclass
class ReportedStalls:
    """What a watch has reported, in order."""

    began: list[Stall] = field(default_factory=list)
    ended: list[Stall] = field(default_factory=list)
    has_begun: threading.Event = field(default_factory=threading.Event)
    has_ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self, **options: Any) -> Iterator[None]:
        watch = StallWatch(SECONDS, self._begin, self._end, **options)
        watch.start()
        try:
            yield
        finally:
            watch.close()

    def block(self) -> None:
        """Hold the caller's thread until the watch has noticed."""
        assert self.has_begun.wait(DEADLINE_SECONDS)

    def _begin(self, stall: Stall) -> None:
        self.began.append(stall)
        self.has_begun.set()

    def _end(self, stall: Stall) -> None:
        self.ended.append(stall)
        self.has_ended.set()


async def test_blocking_line_is_reported_while_it_blocks_and_again_when_it_has_ended() -> None:
    reported = ReportedStalls()
    with reported.watching():
        reported.block()
        line = ReportedStalls.block.__code__.co_firstlineno + 2
        assert [stall.where.rpartition("/")[2] for stall in reported.began] == [f"{Path(__file__).name}:{line}"]
        assert reported.ended == []
        await asyncio.to_thread(reported.has_ended.wait, DEADLINE_SECONDS)
    (began,), (ended,) = reported.began, reported.ended
    assert (ended.where, ended.function) == (began.where, "block")
    assert ended.seconds >= began.seconds >= SECONDS
    assert began.source == "assert self.has_begun.wait(DEADLINE_SECONDS)"


async def test_stall_names_the_episode_that_caused_it_also_in_a_task_of_its_own() -> None:
    reported = ReportedStalls()

    async def inner() -> None:
        reported.block()

    with reported.watching(), workflow_context.enter(WorkflowContext(task_id=7, workflow="my_module.MyAgent")):
        await asyncio.create_task(inner())
    assert [(stall.workflow, stall.task_id) for stall in reported.ended] == [("my_module.MyAgent", 7)]


async def test_call_that_keeps_pythons_lock_is_found_when_it_lets_go() -> None:
    reported = ReportedStalls()
    with reported.watching():
        while not reported.began:  # a busy machine may give the first one's time to others
            re.match(r"(a+)+$", "a" * 22 + "b")
    assert "test_stall_watch.py" in reported.began[0].where


async def test_waiting_loop_is_not_a_stall() -> None:
    reported = ReportedStalls()
    with reported.watching():
        await asyncio.wait((asyncio.create_task(asyncio.Event().wait()),), timeout=3 * SECONDS)
    assert (reported.began, reported.ended) == ([], [])


async def test_callback_that_other_processes_keep_from_running_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = ReportedStalls()
    monkeypatch.setattr("areal.infra.stalls.starvation_clock", lambda thread: time.monotonic)  # starved all the time
    with reported.watching():
        threading.Event().wait(4 * SECONDS)
    assert (reported.began, reported.ended) == ([], [])


PERIOD = 0.1


@pytest.mark.parametrize(
    ("passed", "lost"),
    [
        (Clocks(PERIOD), 0.0),  # it waits in a call, as in time.sleep
        (Clocks(PERIOD, used=PERIOD), 0.0),
        (Clocks(PERIOD, used=0.02, starved=0.08), 0.08),
        (Clocks(1.0), 0.9),  # nobody could look: a thread with Python's lock had no processor
        (Clocks(1.0, watch_starved=0.9), 0.9),
        (Clocks(1.0, used=1.0), 0.0),
        (Clocks(1.0, used=0.3, starved=0.65), 0.65),
    ],
)
def test_time_counts_only_if_a_callback_waits_or_computes(passed: Clocks, lost: float) -> None:
    assert passed.lost(PERIOD) == pytest.approx(lost)
    assert Clocks(7, 3, 2, 1).since(Clocks(4, 2, 1, 1)) == Clocks(3, 1, 1, 0)


def test_late_look_is_a_call_that_keeps_pythons_lock_only_if_it_was_not_for_a_processor() -> None:
    assert Clocks(1.0, used=0.9).kept_lock(0.5)
    assert not Clocks(1.0, used=0.9, watch_starved=0.8).kept_lock(0.5)  # many callbacks may have run meanwhile
    assert not Clocks(1.0, used=0.1).kept_lock(0.5)


async def test_callback_that_is_new_after_a_late_look_is_not_blamed_for_what_was_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = ReportedStalls()
    monkeypatch.setattr("areal.infra.stalls.Clocks.kept_lock", lambda passed, seconds: False)
    with reported.watching():
        for _ in range(3):
            re.match(r"(a+)+$", "a" * 22 + "b")  # the watching thread looks once, when it is over
            await asyncio.sleep(0)
    assert reported.began == []


async def test_loading_certificates_is_no_fault_of_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = ReportedStalls()
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *args, **named: time.sleep(3 * SECONDS))
    with reported.watching():
        ssl.create_default_context(cafile="some.pem")
    assert reported.began == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not say it")
def test_starvation_is_the_time_that_a_thread_waits_for_a_processor() -> None:
    allowed, clock = os.sched_getaffinity(0), starvation_clock(threading.get_native_id())
    os.sched_setaffinity(0, {min(allowed)})  # this thread, and the process that it starts
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, deadline = clock(), time.monotonic() + DEADLINE_SECONDS
        while clock() - before < 2 * SECONDS and time.monotonic() < deadline:
            pass
        assert clock() - before >= 2 * SECONDS
        assert clock() - before < time.monotonic() - (deadline - DEADLINE_SECONDS)
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, allowed)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Write a module where libraries are, and import it."""
    monkeypatch.setattr("areal.infra.stalls.LIBRARIES", (f"{tmp_path}/", str(Path(asyncio.__file__).parents[1])))
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def install(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(text)
        made.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield install
    for name in made:
        sys.modules.pop(name, None)


async def test_library_that_blocks_is_blamed_on_the_line_that_called_it(installed: Callable[[str, str], Any]) -> None:
    reported = ReportedStalls()
    library = installed("requests_like", "def get(wait):\n    return wait()\n")
    with reported.watching():
        library.get(lambda: None)
        library.get(reported.has_begun.wait)
    assert reported.began[0].source == "library.get(reported.has_begun.wait)"
    assert reported.began[0].function == "test_library_that_blocks_is_blamed_on_the_line_that_called_it"


async def test_importing_something_is_no_fault_of_an_episode(installed: Callable[[str, str], Any]) -> None:
    reported = ReportedStalls()
    with reported.watching():
        installed("slow_to_load", f"import threading\nthreading.Event().wait({3 * SECONDS})\n")
    assert reported.began == []


async def test_workflow_that_is_installed_like_a_library_is_found_by_who_calls_it(
    installed: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = ReportedStalls()
    agent = installed("installed_agent", "async def run(wait):\n    wait()\n")

    async def call(function: Any, *args: Any) -> Any:
        return await function(*args)

    monkeypatch.setattr("areal.infra.stalls.LIBRARIES", ("/",))
    with reported.watching(entries=(call.__code__,)):
        await asyncio.create_task(call(agent.run, reported.has_begun.wait))
    assert [stall.where.rpartition("/")[2] for stall in reported.began] == ["installed_agent.py:2"]


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("time.sleep(3)", "await asyncio.sleep(...)"),
        ("text = open(path).read()", "aiofiles.open"),
        ("page = requests.get(url)", "get_aiohttp_session()"),
        ("x = score(answer)", "AsyncRewardWrapper"),
    ],
)
def test_remedy_fits_the_line(source: str, remedy: str) -> None:
    assert remedy in remedy_for(source, [])


@pytest.mark.parametrize(
    ("source", "modules", "remedy"),
    [
        (
            "answer = client.responses.create()",
            ["openai._client", "httpcore._sync.http11"],
            "AsyncOpenAI",
        ),
        ("page = client.get(url)", ["httpx._client", "httpcore._sync.connection_pool"], "get_aiohttp_session()"),
        ("x = await client.responses.create()", ["openai._base_client", "httpx._client"], "less computing at once"),
        ("return await graph.ainvoke(messages)", ["langchain.chains"], "less computing at once"),
        ("page = await fetch(url)", ["helpers", "requests.sessions"], "get_aiohttp_session()"),
    ],
)
def test_remedy_fits_what_the_line_calls(source: str, modules: list[str], remedy: str) -> None:
    assert remedy in remedy_for(source, modules)


def stall(where: str, seconds: float) -> Stall:
    return Stall(where, "run", "time.sleep(3)", "await asyncio.sleep(...)", "my_module.MyAgent", 7, seconds, 1)


def test_sentences_say_who_where_how_long_and_what_instead() -> None:
    ended = stall("my_module.py:41", 3.04)
    assert describe_ended(ended) == (
        "my_module.MyAgent (task 7) blocked the event loop for 3.0 s at my_module.py:41 in run: time.sleep(3); "
        "use await asyncio.sleep(...)"
    )
    assert "has been blocking the event loop for 3.0 s at my_module.py:41" in describe_ongoing(ended)


def test_first_stalls_of_a_line_are_logged_and_the_rest_summed_up(log_lines: list[str]) -> None:
    log = StallLog()
    for _ in range(5):
        log.begin(stall("a.py:1", 0.5))
        log.end(stall("a.py:1", 0.5))
    log.end(stall("b.py:2", 9.0), logged=True)
    assert [" has been blocking " in line for line in log_lines] == [True, False] * 3
    assert log.summary() == [
        "b.py:2 blocked the event loop once, 9.0 s in all; use await asyncio.sleep(...)",
        "a.py:1 blocked the event loop 5 times, 2.5 s in all; use await asyncio.sleep(...)",
    ]


async def test_callback_that_waits_for_its_own_loop_is_interrupted_where_it_is() -> None:
    reported, going_on = ReportedStalls(), asyncio.Event()

    async def waits_for_ever() -> None:
        threading.Event().wait()

    async def goes_on() -> None:
        going_on.set()

    with reported.watching(limit_seconds=2 * SECONDS):
        stuck = asyncio.create_task(waits_for_ever())
        other = asyncio.create_task(goes_on())
        with pytest.raises(LoopBlocked):
            await stuck
        await other
    assert going_on.is_set()
    assert reported.ended[0].source == "threading.Event().wait()"


async def test_a_callback_that_ends_while_it_is_looked_at_belongs_to_no_episode() -> None:
    """The thread that looks must not end for it: nothing would be noticed from then on."""
    found: list[Callback | None] = []
    with workflow_context.enter(WorkflowContext(task_id=3)):
        asyncio.get_running_loop().call_soon(lambda: found.append(running_callback(threading.get_ident())))
    await asyncio.sleep(0)
    (callback,) = found
    assert callback is not None
    assert workflow_context.of(callback.context) == WorkflowContext()
