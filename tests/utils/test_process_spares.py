"""Where a pool's processes come from: the server that forks them, the spares that take the place of lost ones."""

import errno
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from misbehaving_calls import act
from process_end import ended_within

from areal.utils.process_pool import fork_server
from areal.utils.process_pool.fork_server import ForkServer
from areal.utils.process_pool.pool import CallCrashed, CallTimeout, LoadFailed, PackedFunction, PoolClosed, ProcessPool

pytestmark = pytest.mark.slow

LONG_SECONDS = 60.0


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(1) as pool:
        yield pool


def result_of(pool: ProcessPool, function: Any, *args: Any, timeout_seconds: float = LONG_SECONDS) -> Any:
    return pool.submit(function, args, timeout_seconds=timeout_seconds).result(LONG_SECONDS)


def lose_a_process(pool: ProcessPool) -> None:
    with pytest.raises(CallCrashed):
        result_of(pool, os._exit, 3)


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG_SECONDS
    while not (value := found()):
        assert time.monotonic() < deadline
        os.sched_yield()
    return value


def test_well_behaved_calls_have_no_spare(pool: ProcessPool) -> None:
    assert result_of(pool, math.sqrt, 4.0) == 2.0
    with pytest.raises(Exception, match=r"math domain error|nonnegative"):
        result_of(pool, math.sqrt, -1.0)
    assert pool.spares() == []


def test_a_spare_takes_the_place_of_a_lost_process(pool: ProcessPool) -> None:
    lose_a_process(pool)
    (spare,) = until(pool.spares)
    assert spare not in pool.pids()
    assert len(pool.pids()) == 1
    lose_a_process(pool)
    assert result_of(pool, os.getpid) == spare
    assert pool.pids() == [spare]


def test_a_spare_that_was_killed_harms_no_call(pool: ProcessPool) -> None:
    for _ in range(3):
        lose_a_process(pool)
        (spare,) = until(pool.spares)
        os.kill(spare, signal.SIGKILL)
        lose_a_process(pool)
        assert result_of(pool, math.sqrt, 4.0) == 2.0


def load_once(note: str) -> Callable[[str], None]:
    """Loads in the first process that does, and in no other."""
    descriptor = os.open(note, os.O_CREAT | os.O_EXCL)
    os.close(descriptor)
    return lambda how: os._exit(3) if how == "crash" else None


class Loaded:
    """What a function of the test makes where it arrives."""

    def __init__(self, loader: Callable[..., Any], *args: str) -> None:
        self._call = loader, args

    def __reduce__(self) -> Any:
        return self._call


def test_a_spare_that_cannot_load_the_function_is_done_without(pool: ProcessPool, tmp_path: Path) -> None:
    packed = PackedFunction.of(Loaded(load_once, str(tmp_path / "note")))  # type: ignore[arg-type]  # when unpacked
    with pytest.raises(CallCrashed):
        result_of(pool, packed, "crash")
    with pytest.raises(LoadFailed):
        result_of(pool, packed, "again")
    assert result_of(pool, math.sqrt, 4.0) == 2.0
    assert pool.spares() == []


def hang_in_a_second_process(note: str) -> Callable[[], None]:
    """Loads in the first process that does; a later one says who it is and loads for ever."""
    try:
        os.close(os.open(note, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        Path(f"{note}.fifo").write_text(str(os.getpid()))
        signal.pause()
    return lambda: os._exit(3)


def test_a_pool_that_is_closed_while_a_spare_loads_leaves_nothing(pool: ProcessPool, tmp_path: Path) -> None:
    note = str(tmp_path / "note")
    os.mkfifo(f"{note}.fifo")
    packed = PackedFunction.of(Loaded(hang_in_a_second_process, note))  # type: ignore[arg-type]  # when unpacked
    with pytest.raises(CallCrashed):
        result_of(pool, packed)
    loading = int(Path(f"{note}.fifo").read_text())
    began = pool.supervisors()
    pool.close()
    assert all(ended_within(pid, 10.0) for pid in [loading, *began])


def test_a_loading_spare_keeps_no_call_waiting(pool: ProcessPool, tmp_path: Path) -> None:
    note = str(tmp_path / "note")
    os.mkfifo(f"{note}.fifo")
    packed = PackedFunction.of(Loaded(hang_in_a_second_process, note))  # type: ignore[arg-type]  # when unpacked
    with pytest.raises(CallCrashed):
        result_of(pool, packed)
    Path(f"{note}.fifo").read_text()
    lose_a_process(pool)
    assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_spares_end_with_the_process_of_the_pool() -> None:
    script = """
        import os, signal, time
        from areal.utils.process_pool.pool import ProcessPool
        pool = ProcessPool(2)
        for _ in range(3):
            pool.submit(os._exit, (3,), timeout_seconds=60).exception(60)
        deadline = time.monotonic() + 60
        while not pool.spares() and time.monotonic() < deadline:
            os.sched_yield()
        print(*pool.spares(), *pool.pids(), *pool.supervisors(), flush=True)
        signal.pause()
        """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    driver.kill()
    driver.wait(LONG_SECONDS)
    driver.stdout.close()
    assert len(pids) >= 3
    assert all(ended_within(pid, 10.0) for pid in pids)


def test_a_server_that_was_killed_is_started_again(pool: ProcessPool) -> None:
    worker = result_of(pool, os.getpid)
    (server,) = pool.supervisors()
    os.kill(server, signal.SIGKILL)
    assert ended_within(worker, 10.0)
    assert result_of(pool, math.sqrt, 4.0) == 2.0
    assert pool.supervisors() != [server]


def test_a_server_that_cannot_be_started_fails_the_call(monkeypatch: pytest.MonkeyPatch, pool: ProcessPool) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(fork_server.subprocess, "Popen", refuse)
        with pytest.raises(CallCrashed, match=r"no worker process could be started .*no more processes"):
            result_of(pool, math.sqrt, 4.0)
    assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_a_fork_server_without_requests_has_no_process() -> None:
    server = ForkServer()
    assert server.pid is None
    server.close()


def test_new_processes_have_the_environment_and_directory_of_that_moment(
    monkeypatch: pytest.MonkeyPatch, pool: ProcessPool, tmp_path: Path
) -> None:
    assert result_of(pool, os.getenv, "OF_THAT_MOMENT") is None
    monkeypatch.setenv("OF_THAT_MOMENT", "yes")
    monkeypatch.chdir(tmp_path)
    lose_a_process(pool)
    assert result_of(pool, os.getenv, "OF_THAT_MOMENT") == "yes"
    assert result_of(pool, os.getcwd) == str(tmp_path)


def test_a_process_starts_in_a_directory_that_was_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.syspath_prepend("")  # as in an interpreter that was started with -c
    (tmp_path / "gone").rmdir()
    with ProcessPool(1) as pool:
        assert result_of(pool, math.sqrt, 4.0) == 2.0


DIES_AFTER_ITS_SECOND_FORK = """
import os, signal, sys
control, sys.path[:] = sys.argv[1], sys.argv[2:]
from areal.utils.process_pool import fork_server, worker
server, main, send_fds, forks = os.getpid(), worker.main, fork_server.socket.send_fds, []
def main_without_a_parent(*arguments):
    while len(forks) == 1 and os.getppid() == server:
        os.sched_yield()
    main(*arguments)
def send_once(*arguments):
    forks.append(1)
    send_fds(*arguments) if len(forks) == 1 else os.kill(server, signal.SIGKILL)
try:
    os.close(os.open({note!r}, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    pass
else:
    worker.main, fork_server.socket.send_fds = main_without_a_parent, send_once
fork_server.serve(int(control))
"""


def test_process_whose_server_died_before_it_told_of_it_takes_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = DIES_AFTER_ITS_SECOND_FORK.format(note=str(tmp_path / "note"))
    monkeypatch.setattr(fork_server, "_BOOTSTRAP", script)
    with ProcessPool(1) as pool:
        lose_a_process(pool)
        answers = {result_of(pool, os.getppid) for _ in range(20)}
        assert answers == set(pool.supervisors())


@pytest.mark.parametrize("seed", range(3))
def test_random_kills_cost_only_the_calls_that_ran(tmp_path: Path, seed: int) -> None:
    draw, notes = random.Random(seed), tmp_path / "notes"
    notes.touch()
    function = PackedFunction.of(act)
    with ProcessPool(2) as pool:
        futures = []
        for number in range(300):
            futures.append(pool.submit(function, ("return", number, str(notes)), timeout_seconds=LONG_SECONDS))
            if number % 20 == 10:
                futures[-1].exception(LONG_SECONDS)
                victims = draw.choice([pool.pids(), pool.spares() or pool.pids(), pool.supervisors()])
                for victim in victims[: draw.choice([1, 2])]:
                    with suppress(ProcessLookupError):  # it has ended meanwhile
                        os.kill(victim, signal.SIGKILL)
        for number, future in enumerate(futures):
            error = future.exception(LONG_SECONDS)
            assert error is None or isinstance(error, CallCrashed)
            assert error is not None or future.result() == act("return", number)
        left = [*pool.pids(), *pool.spares(), *pool.supervisors()]
        assert result_of(pool, math.sqrt, 4.0) == 2.0
    ran = notes.read_text().split()
    assert len(ran) == len(set(ran))
    assert all(ended_within(pid, 10.0) for pid in left)


def test_a_hanging_call_has_failed_when_nothing_of_it_runs(pool: ProcessPool, tmp_path: Path) -> None:
    note = tmp_path / "note"

    def hang() -> None:
        sleeper = subprocess.Popen(["sleep", "600"])
        note.write_text(f"{os.getpid()} {sleeper.pid}")
        signal.pause()

    lose_a_process(pool)
    with pytest.raises(CallTimeout):
        result_of(pool, hang, timeout_seconds=5.0)
    assert all(ended_within(int(pid), 0.0) for pid in note.read_text().split())


def test_calls_that_run_when_the_pool_is_closed_say_so(pool: ProcessPool) -> None:
    lose_a_process(pool)
    future = pool.submit(signal.pause, timeout_seconds=LONG_SECONDS)
    until(lambda: future.running() or pool.pids())
    pool.close()
    with pytest.raises(PoolClosed):
        future.result(LONG_SECONDS)


def place_and_mask() -> tuple[str, int]:
    before = os.umask(0)
    os.umask(before)
    return time.strftime("%Z", time.localtime(0)), before


def test_a_process_has_the_time_zone_and_the_umask_of_the_moment(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    result_of(pool, place_and_mask)
    before = os.umask(0o027)
    try:
        monkeypatch.setenv("TZ", "XYZ-9")
        time.tzset()
        lose_a_process(pool)
        assert result_of(pool, place_and_mask) == ("XYZ", 0o027)
    finally:
        os.umask(before)
        monkeypatch.undo()
        time.tzset()


AT_THE_LIMIT = """
import math, os, resource
from areal.utils.process_pool.pool import CallCrashed, ProcessPool

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for free in range(2, 12):
    with ProcessPool(1) as first, ProcessPool(1) as pool:
        pool.submit(math.sqrt, (4.0,), timeout_seconds=30).result(60)
        os.kill(pool.pids()[0], 9)
        highest, held = max(map(int, os.listdir("/proc/self/fd"))), []
        while (file := os.open("/dev/null", os.O_RDONLY)) <= highest:
            held.append(file)
        os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + free, hard))
        try:
            pool.submit(math.sqrt, (9.0,), timeout_seconds=30).result(60)
        except CallCrashed as crash:
            assert "Too many open files" in str(crash), crash
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for file in held:
                os.close(file)
        assert pool.submit(math.sqrt, (16.0,), timeout_seconds=30).result(60) == 4.0
print("all settled")
"""


def test_no_call_waits_for_ever_where_descriptors_have_run_out() -> None:
    ran = subprocess.run([sys.executable, "-c", AT_THE_LIMIT], capture_output=True, text=True, timeout=100)
    assert ran.stdout.endswith("all settled\n"), ran.stderr


def test_descriptors_that_a_pool_is_sent_are_not_inherited(pool: ProcessPool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    result_of(pool, math.sqrt, 4.0)
    new = [int(name) for name in set(os.listdir("/proc/self/fd")) - before]
    assert new
    for descriptor in new:
        with suppress(OSError):  # that of the listing itself
            assert not os.get_inheritable(descriptor)
