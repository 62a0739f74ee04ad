"""What code that is not ours can do from a worker process: to the pool's process, to other calls, to the machine."""

import asyncio
import math
import os
import select
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from process_end import ended_within

from areal.utils.process_pool import worker
from areal.utils.process_pool.calls import PoolCall
from areal.utils.process_pool.channel import RESULTS, TOKEN_BYTES, PoolFrame
from areal.utils.process_pool.descendants import children_of
from areal.utils.process_pool.pool import CallCrashed, CallTimeout, PackedFunction, ProcessPool, ResultRefused

pytestmark = pytest.mark.slow

LONG_SECONDS = 60.0
SHORT_SECONDS = 0.5


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(1) as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[ProcessPool]:
    """For calls that do no harm."""
    with ProcessPool(1) as made:
        yield made


def result_of(pool: ProcessPool, function: Any, *args: Any, timeout_seconds: float = LONG_SECONDS) -> Any:
    return pool.submit(function, args, timeout_seconds=timeout_seconds).result(LONG_SECONDS)


def run_script(text: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


# Results are data.


class Level(IntEnum):
    HIGH = 3


class Malicious:
    """Unpickled, it leaves a note."""

    def __init__(self, note: str) -> None:
        self.note = note

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.note),)


def test_result_that_is_an_object_runs_no_code_here(pool: ProcessPool, tmp_path: Path) -> None:
    note = tmp_path / "ran"

    def attack() -> Malicious:
        return Malicious(str(note))

    with pytest.raises(ResultRefused, match=r"attack returned no result that can be sent: .*cannot send Malicious"):
        result_of(pool, attack)
    assert not note.exists()


def test_exception_that_is_malicious_runs_no_code_here(pool: ProcessPool, tmp_path: Path) -> None:
    note = tmp_path / "ran"

    def attack() -> None:
        class Sly(Exception):
            def __reduce__(self):  # type: ignore[no-untyped-def]
                return note.touch, ()

        raise Sly("sly")

    with pytest.raises(Exception, match=r"attack raised .*Sly: sly"):
        result_of(pool, attack)
    assert not note.exists()


PLAIN: list[tuple[Callable[[], Any], Any]] = [
    (lambda: None, None),
    (
        lambda: (1, [2.5, "ü\ud800", b"\0"], {"a": (True,), 3: None}),
        (1, [2.5, "ü\ud800", b"\0"], {"a": (True,), 3: None}),
    ),
    (lambda: [2**70, -(2**300)], [2**70, -(2**300)]),
    (lambda: Level.HIGH, 3),
    (lambda: [Counter("aab"), OrderedDict(b=1)], [{"a": 2, "b": 1}, {"b": 1}]),
    (lambda: [np.float32(0.5), np.bool_(True), np.int64(7)], [0.5, True, 7]),
    (lambda: -math.inf, -math.inf),
]


@pytest.mark.parametrize(("make", "expected"), PLAIN)
def test_plain_result_comes_back(shared: ProcessPool, make: Callable[[], Any], expected: Any) -> None:
    result = result_of(shared, make)
    assert result == expected
    assert type(result) is type(expected)


def test_arrays_come_back_with_type_and_shape(shared: ProcessPool) -> None:
    array = result_of(shared, lambda: {"a": np.arange(6, dtype=np.int16).reshape(2, 3)})["a"]
    assert (array.dtype, array.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
    scalar = result_of(shared, lambda: np.array(0.25))
    assert (scalar.shape, float(scalar)) == ((), 0.25)
    assert math.isnan(result_of(shared, lambda: np.array([np.nan]))[0])


def test_tensors_arrive_as_arrays_in_a_process_without_torch() -> None:
    pytest.importorskip("torch")
    script = run_script(
        """
        import sys
        from areal.utils.process_pool.pool import ProcessPool
        def tensors():
            import torch
            made = torch.tensor([1.5, 2.0], requires_grad=True)
            return [made, made.bfloat16(), torch.tensor(3), torch.arange(4).reshape(2, 2).T]
        with ProcessPool(1) as pool:
            arrays = pool.submit(tensors, timeout_seconds=60).result(60)
        print([(str(array.dtype), array.tolist()) for array in arrays])
        print("torch" in sys.modules)
        """
    )
    output, _ = script.communicate(timeout=LONG_SECONDS)
    arrays = [
        ("float32", [1.5, 2.0]),
        ("float32", [1.5, 2.0]),
        ("int64", 3),
        ("int64", [[0, 2], [1, 3]]),
    ]
    assert output == f"{arrays}\nFalse\n"


def circular() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


NO_DATA: list[tuple[Callable[[], Any], str]] = [
    (lambda: {1, 2}, r"cannot send set \{1, 2\} .*; send plain values \(None, .*numpy arrays, torch tensors$"),
    (lambda: [object()], "cannot send object"),
    (lambda: np.array([None]), "numbers or booleans, got dtype object; convert it first"),
    (lambda: np.array(["text"]), "got dtype <U4"),
    (circular, "lists in lists over 500 deep"),
    (lambda: 1 << 100_000, "an integer may have 1785 bytes .*, got 12501"),
]


@pytest.mark.parametrize(("make", "message"), NO_DATA)
def test_result_that_is_no_data_is_refused_with_what_is_allowed(
    shared: ProcessPool, make: Callable[[], Any], message: str
) -> None:
    named = PackedFunction("score", PackedFunction.of(make).payload, PackedFunction.of(make).digest)
    with pytest.raises(ResultRefused, match=f"^score returned no result that can be sent: .*{message}"):
        result_of(shared, named)
    assert result_of(shared, math.sqrt, 4.0) == 2.0
    assert len(shared.pids()) == 1


def test_result_beyond_the_size_that_may_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MOST_RESULT_BYTES", 10)
    kind, body = worker._pack_result("ten bytes and more")
    assert kind is PoolFrame.REFUSED
    assert "a result may take 10 bytes, got 19; write it to a file" in RESULTS.unpack(body)[1]


HOSTILE_BODIES = [
    msgpack.packb([msgpack.ExtType(1, b"array"), "O", b"\0" * 8, 1]),
    msgpack.packb([msgpack.ExtType(1, b"array"), "f8,O", b"\0" * 16, 1]),
    msgpack.packb([msgpack.ExtType(1, b"array"), "f8", b"\0" * 8, 10**15]),
    msgpack.packb([msgpack.ExtType(1, b"array"), "f8", b"\0" * 8, -1]),
    msgpack.packb([msgpack.ExtType(1, b"array"), "f8"]),
    msgpack.packb([msgpack.ExtType(1, b"array")]),
    msgpack.packb([msgpack.ExtType(1, b"\xff\xfe")]),
    msgpack.packb(msgpack.ExtType(2, b"\x01" * 5000)),
    msgpack.packb(msgpack.ExtType(5, b"")),
    b"\x91" * 5000 + b"\xc0",
    b"\xdd\xff\xff\xff\xff" * 100,
    b"\x81\x91\x01\x01",
    b"\xc1",
    b"",
    b"\x01\x01",
]


@pytest.mark.parametrize("body", HOSTILE_BODIES)
def test_bytes_that_no_worker_packs_are_errors(body: bytes) -> None:
    with pytest.raises((TypeError, ValueError)):
        RESULTS.unpack(body)


# Answers cannot be taken for those of other calls.


def write_to_every_socket(data: bytes) -> None:
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        if int(descriptor) > 2 and os.path.exists(path) and "socket:" in os.readlink(path):
            os.write(int(descriptor), data)


def frame(kind: PoolFrame, body: bytes) -> bytes:
    return struct.pack("!BQ", kind, len(body)) + body


def test_answer_written_by_the_function_itself_is_a_crash_and_no_result(pool: ProcessPool) -> None:
    def forge(body: bytes) -> float:
        write_to_every_socket(frame(PoolFrame.RESULT, body))
        return 0.0

    for body in (RESULTS.pack(1.0), bytes(TOKEN_BYTES) + RESULTS.pack(1.0), b""):
        with pytest.raises(CallCrashed, match="forge wrote into the channel of its process"):
            result_of(pool, forge, body)
    assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_answers_forged_for_later_calls_do_not_reach_them(pool: ProcessPool) -> None:
    def forge(value: int) -> int:
        if value == 0:
            # Its own answer and those of the calls after it, with the token of none.
            for _ in range(20):
                for kind, body in ((PoolFrame.RESULT, RESULTS.pack(666)), (PoolFrame.STARTED, b"")):
                    write_to_every_socket(frame(kind, bytes(TOKEN_BYTES) + body))
        return value

    packed = PackedFunction.of(forge)
    result_of(pool, packed, 1)
    futures = [pool.submit(packed, (value,), timeout_seconds=LONG_SECONDS) for value in range(30)]
    assert isinstance(futures[0].exception(LONG_SECONDS), CallCrashed)
    # Those that began in the same process before the pool noticed are lost with it; none is answered by the forger.
    ends = [future.exception(LONG_SECONDS) or future.result() for future in futures[1:]]
    assert all(end == value or isinstance(end, CallCrashed) for value, end in enumerate(ends, 1))
    assert ends[-1] == 29


def test_endless_frame_is_a_crash(pool: ProcessPool) -> None:
    def announce() -> None:
        write_to_every_socket(struct.pack("!BQ", PoolFrame.RESULT, 1 << 60))

    with pytest.raises(CallCrashed, match="a frame of 1152921504606846976 bytes"):
        result_of(pool, announce)


def test_frame_left_over_after_the_answer_costs_its_process_and_no_call(pool: ProcessPool, tmp_path: Path) -> None:
    """It is there before the next call begins; a call that has begun would be lost with the process."""
    wrote = tmp_path / "wrote"
    os.mkfifo(wrote)
    reader = os.open(wrote, os.O_RDONLY | os.O_NONBLOCK)

    def write_late() -> None:
        import threading

        writer, at_end = os.open(wrote, os.O_WRONLY), threading.Event()

        def scribble() -> None:
            at_end.wait()
            while True:
                write_to_every_socket(frame(PoolFrame.STARTED, bytes(TOKEN_BYTES)))
                os.write(writer, b".")

        threading.Thread(target=scribble, daemon=True).start()
        at_end.set()

    packed = PackedFunction.of(write_late)
    first = pool.submit(packed, timeout_seconds=LONG_SECONDS)
    assert isinstance(first.exception(LONG_SECONDS), CallCrashed | None)
    assert select.select([reader], [], [], LONG_SECONDS)[0], "it neither wrote nor was killed"
    os.close(reader)
    assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_closing_every_descriptor_is_a_crash_at_once(pool: ProcessPool) -> None:
    def close_all() -> None:
        os.closerange(3, 4096)
        signal.pause()

    with pytest.raises(CallCrashed, match="unless it closed the channel"):
        result_of(pool, close_all)
    assert result_of(pool, math.sqrt, 4.0) == 2.0


# A call leaves nothing for the next one.


def spoil(directory: str) -> int:
    """Everything that code which protects itself from a program's mistakes is known to do, and more."""
    import builtins
    import resource
    import shutil

    os.environ["OMP_NUM_THREADS"] = "99"
    os.environ["LEFT_BEHIND"] = "yes"
    del os.environ["PATH"]
    os.chdir(directory)
    os.umask(0o777)
    sys.path.insert(0, directory)
    sys.setrecursionlimit(5000)
    sys.stdout = None  # type: ignore[assignment]
    for limit, soft in ((resource.RLIMIT_NOFILE, 20), (resource.RLIMIT_AS, 1 << 40)):
        resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
    signal.signal(signal.SIGALRM, lambda *_: os._exit(7))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    builtins.len = lambda _: 42
    builtins.left_behind = True  # type: ignore[attr-defined]
    for name in ("exit", "quit", "sum"):
        delattr(builtins, name)
    for name in ("kill", "getcwd", "chdir", "umask", "putenv", "unsetenv", "fork", "environ", "waitid", "listdir"):
        setattr(os, name, None)
    os.path.realpath = None  # type: ignore[assignment]
    shutil.rmtree = None  # type: ignore[assignment]
    sys.modules["json"] = None  # type: ignore[assignment]
    sys.modules["math"] = sys
    return os.getpid()


def state() -> dict[str, Any]:
    import builtins
    import json
    import math
    import resource

    select.select([], [], [], 0.2)  # as long as a timer of the call before needs to go off
    mask = os.umask(0)
    os.umask(mask)
    return {
        "variables": dict(os.environ),
        "c_variables": subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout.count(
            "LEFT"
        ),
        "directory": os.getcwd(),
        "mask": mask,
        "path": list(sys.path),
        "recursion": sys.getrecursionlimit(),
        "stdout": sys.stdout is not None,
        "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)],
        "handlers": [repr(signal.getsignal(number)) for number in (signal.SIGALRM, signal.SIGTERM)],
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "builtins": [len("abc"), sum((1, 2)), sorted(vars(builtins))],
        "modules": [json.loads("1"), math.sqrt(4.0), os.path.realpath("/"), callable(os.kill)],
    }


def test_call_that_changes_its_process_leaves_it_as_it_was(pool: ProcessPool, tmp_path: Path) -> None:
    before = result_of(pool, state)
    result_of(pool, spoil, str(tmp_path))
    assert result_of(pool, state) == before
    for _ in range(3):  # also within one batch
        result_of(pool, spoil, str(tmp_path))
    assert result_of(pool, state) == before


def test_call_that_fails_leaves_its_process_as_it_was_too(pool: ProcessPool, tmp_path: Path) -> None:
    def spoil_and_raise() -> None:
        spoil(str(tmp_path))
        raise ValueError("after all that")

    before = result_of(pool, state)
    with pytest.raises(Exception, match="after all that"):
        result_of(pool, spoil_and_raise)
    assert result_of(pool, state) == before


def test_import_during_a_call_does_not_make_its_other_changes_last(pool: ProcessPool) -> None:
    def change_and_import() -> None:
        os.kill = None  # type: ignore[assignment]
        import colorsys  # noqa: F401  (any module that was not loaded)

    packed = PackedFunction.of(change_and_import)
    for future in [pool.submit(packed, timeout_seconds=LONG_SECONDS) for _ in range(20)]:
        future.result(LONG_SECONDS)
    assert result_of(pool, lambda: callable(os.kill))


def test_call_that_lowers_a_hard_limit_costs_its_process_and_no_other_call(pool: ProcessPool) -> None:
    def lower() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))

    before = result_of(pool, state)
    result_of(pool, lower)
    assert result_of(pool, state) == before


def test_process_that_is_as_it_was_is_kept(pool: ProcessPool, tmp_path: Path) -> None:
    assert result_of(pool, spoil, str(tmp_path)) == result_of(pool, os.getpid)


def test_what_a_module_sets_when_it_is_imported_lasts(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import builtins, os\nos.environ['SET_BY_IMPORT'] = '1'\nbuiltins._ = str\n"
    (tmp_path / "setting_module.py").write_text(text + "def read():\n    return os.environ['SET_BY_IMPORT'] + _(2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "setting_module", None)
    monkeypatch.delitem(sys.modules, "setting_module")
    packed = PackedFunction("read", b"csetting_module\nread\n.", b"s" * 16)
    assert [result_of(pool, packed), result_of(pool, packed)] == ["12", "12"]


# What a call starts ends with it.

DAEMON = """
import os, sys, signal
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
with open(sys.argv[1], "w") as file: file.write(str(os.getpid()))
signal.pause()
"""


def start_daemon(note: str, end: str = "") -> None:
    """Start a process in a session of its own, whose parents are gone; note its number, and end as told."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-S", "-c", DAEMON, f"/proc/self/fd/{theirs}"]
    subprocess.run(command, pass_fds=[theirs], check=True)
    Path(note).write_bytes(os.read(ours, 100))
    if end == "hang":
        signal.pause()
    if end == "crash":
        os._exit(3)
    if end == "killed":
        os.kill(0, signal.SIGKILL)


@pytest.mark.parametrize("end", ["hang", "crash", "killed", ""])
def test_process_in_a_session_of_its_own_ends_with_the_call_that_started_it(
    pool: ProcessPool, tmp_path: Path, end: str
) -> None:
    note = str(tmp_path / "pid")
    future = pool.submit(start_daemon, (note, end), timeout_seconds=10.0 if end else LONG_SECONDS)
    error = future.exception(LONG_SECONDS)
    expected = {"hang": CallTimeout, "crash": CallCrashed, "killed": CallCrashed, "": type(None)}[end]
    assert isinstance(error, expected), error
    assert ended_within(int(Path(note).read_text()), 10.0)
    assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_crash_is_told_from_the_end_of_what_was_left_behind(pool: ProcessPool, tmp_path: Path) -> None:
    with pytest.raises(CallCrashed, match="exit status 3"):
        result_of(pool, start_daemon, str(tmp_path / "a"), "crash")
    with pytest.raises(CallCrashed, match="SIGKILL"):
        result_of(pool, start_daemon, str(tmp_path / "b"), "killed")


def test_child_that_a_returned_call_left_running_is_killed_and_reaped(pool: ProcessPool) -> None:
    def start() -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    assert ended_within(result_of(pool, start), 0.0)
    (process,) = pool.pids()
    assert children_of(process) == []


def test_process_that_loading_started_serves_every_call(pool: ProcessPool, tmp_path: Path) -> None:
    class Server:
        """Started where it arrives, as by an agent's constructor."""

        def __reduce__(self) -> tuple[Any, ...]:
            return serving, ()

    def serving() -> Callable[[], tuple[int, int | None]]:
        server = subprocess.Popen(["sleep", "600"])
        return lambda: (server.pid, server.poll())

    packed = PackedFunction.of(Server())  # type: ignore[arg-type]  # callable when unpacked
    first, second = result_of(pool, packed), result_of(pool, packed)
    assert first == second
    assert first[1] is None
    pool.close()
    assert ended_within(first[0], 10.0)


def test_reward_processes_that_an_agent_uses_are_shared_by_its_episodes(pool: ProcessPool) -> None:
    def episode() -> int:
        from areal.api.reward_api import AsyncRewardWrapper

        pid: int = asyncio.run(AsyncRewardWrapper(os.getpid, max_workers=1)())
        return pid

    first = result_of(pool, episode)
    assert result_of(pool, episode) == first
    pool.close()
    assert ended_within(first, 10.0)


def test_everything_ends_when_the_process_of_the_pool_is_killed(tmp_path: Path) -> None:
    script = run_script(
        """
        import os, signal, subprocess, sys
        from areal.utils.process_pool.pool import ProcessPool
        daemon, note = sys.argv[1:]
        def hang(daemon, note):
            subprocess.run([sys.executable, "-S", "-c", daemon, note], check=True)
            signal.pause()
        os.mkfifo(note)
        pool = ProcessPool(1)
        pool.submit(hang, (daemon, note), timeout_seconds=600)
        with open(note) as file:
            print(file.read(), *pool.pids(), *pool.supervisors(), flush=True)
        signal.pause()
        """,
        DAEMON,
        str(tmp_path / "note"),
    )
    assert script.stdout is not None
    pids = [int(pid) for pid in script.stdout.readline().split()]
    script.kill()
    script.wait(LONG_SECONDS)
    script.stdout.close()
    assert len(set(pids)) == 3
    assert all(ended_within(pid, 10.0) for pid in pids)


async def test_future_cancelled_by_another_thread_ends_its_waiter_and_no_other(monkeypatch: Any) -> None:
    class Recorded(PoolCall):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    made: list[Recorded] = []
    monkeypatch.setattr("areal.utils.process_pool.pool.PoolCall", Recorded)
    with ProcessPool(1) as pool:
        hanging = asyncio.ensure_future(pool.run(signal.pause, timeout_seconds=LONG_SECONDS))
        good = [asyncio.ensure_future(pool.run(math.sqrt, (4.0,), timeout_seconds=LONG_SECONDS)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(made[0].cancel)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(hanging, LONG_SECONDS)
        assert await asyncio.wait_for(asyncio.gather(*good), LONG_SECONDS) == [2.0] * 3


def say_who_and_pause(note: str) -> None:
    Path(note).write_text(str(os.getpid()))
    signal.pause()


def test_server_that_is_asked_to_end_meanwhile_still_tells_how_its_worker_ended(
    pool: ProcessPool, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    os.mkfifo(note)
    future = pool.submit(say_who_and_pause, (str(note),), timeout_seconds=LONG_SECONDS)
    worker = int(note.read_text())
    (server,) = pool.supervisors()
    os.kill(server, signal.SIGSTOP)
    os.kill(worker, signal.SIGXCPU)
    os.kill(server, signal.SIGTERM)
    os.kill(server, signal.SIGCONT)
    assert "SIGXCPU" in str(future.exception(LONG_SECONDS))
    assert pool.supervisors() == [server]


def stop_the_server() -> None:
    os.kill(os.getppid(), signal.SIGSTOP)


def test_worker_that_stops_its_server_delays_nobody_and_does_not_hold_up_the_end() -> None:
    before = set(threading.enumerate())
    with ProcessPool(1) as pool:
        pool.submit(stop_the_server, timeout_seconds=LONG_SECONDS).result(LONG_SECONDS)
        crash = pool.submit(os._exit, (3,), timeout_seconds=LONG_SECONDS).exception(LONG_SECONDS)
        assert "exit status 3" in str(crash)
        assert pool.submit(math.sqrt, (4.0,), timeout_seconds=LONG_SECONDS).result(LONG_SECONDS) == 2.0
        pool.submit(stop_the_server, timeout_seconds=LONG_SECONDS).result(LONG_SECONDS)
    assert set(threading.enumerate()) <= before
