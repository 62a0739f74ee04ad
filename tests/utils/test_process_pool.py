"""The killable process pool, through its public interface."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_end import ended_within

from areal.utils.process_pool.pool import (
    CallCrashed,
    CallExhausted,
    CallFailed,
    CallTimeout,
    Limits,
    LoadFailed,
    PackedFunction,
    PoolClosed,
    ProcessPool,
    ResultRefused,
)

pytestmark = pytest.mark.slow

LONG_SECONDS = 60.0
SHORT_SECONDS = 0.5


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(2) as made:
        yield made


def result_of(
    pool: ProcessPool, function: Any, *args: Any, timeout_seconds: float = LONG_SECONDS, **kwargs: Any
) -> Any:
    return pool.submit(function, args, kwargs, timeout_seconds=timeout_seconds).result(LONG_SECONDS)


def spin() -> None:
    while True:
        pass


def test_result_of_importable_function_and_of_closure_comes_back(pool: ProcessPool) -> None:
    offset = 10
    assert result_of(pool, math.sqrt, 9.0) == 3.0
    assert result_of(pool, lambda x, *, y: x + y + offset, 1, y=2) == 13


def test_calls_run_outside_this_process_and_none_starts_before_the_first_call(pool: ProcessPool) -> None:
    assert pool.pids() == []
    assert result_of(pool, os.getpid) in pool.pids()
    assert os.getpid() not in pool.pids()


def test_pool_starts_no_more_processes_than_its_size(pool: ProcessPool) -> None:
    futures = [pool.submit(os.getpid, timeout_seconds=LONG_SECONDS) for _ in range(40)]
    assert {future.result(LONG_SECONDS) for future in futures} <= set(pool.pids())
    assert len(pool.pids()) == 2


def test_worker_process_imports_nothing_heavy_of_its_own(pool: ProcessPool) -> None:
    loaded = result_of(pool, lambda: sorted(sys.modules))
    assert {"torch", "numpy", "asyncio"}.isdisjoint(loaded)


def test_idle_process_is_reused_instead_of_starting_another(pool: ProcessPool) -> None:
    assert result_of(pool, os.getpid) == result_of(pool, os.getpid)
    assert len(pool.pids()) == 1


def test_one_hanging_one_crashing_and_fifty_good_calls_give_fifty_right_answers(pool: ProcessPool) -> None:
    hanging = pool.submit(spin, timeout_seconds=SHORT_SECONDS)
    crashing = pool.submit(os._exit, (3,), timeout_seconds=LONG_SECONDS)
    good = [pool.submit(math.factorial, (n,), timeout_seconds=LONG_SECONDS) for n in range(50)]
    assert [future.result(LONG_SECONDS) for future in good] == [math.factorial(n) for n in range(50)]
    with pytest.raises(CallTimeout, match=r"spin was killed after 0\.5 s"):
        hanging.result(LONG_SECONDS)
    with pytest.raises(CallCrashed, match="exit status 3"):
        crashing.result(LONG_SECONDS)


def test_pool_has_its_full_size_again_after_kills_and_crashes(pool: ProcessPool) -> None:
    bad = [
        pool.submit(signal.pause, timeout_seconds=SHORT_SECONDS),
        pool.submit(os.abort, timeout_seconds=LONG_SECONDS),
    ]
    for future in bad:
        assert isinstance(future.exception(LONG_SECONDS), CallTimeout | CallCrashed)
    barrier = [pool.submit(os.getpid, timeout_seconds=LONG_SECONDS) for _ in range(8)]
    assert [future.result(LONG_SECONDS) for future in barrier]
    assert len(pool.pids()) == 2


def test_crash_names_the_signal(pool: ProcessPool) -> None:
    with pytest.raises(CallCrashed, match="SIGSEGV"):
        result_of(pool, lambda: os.kill(os.getpid(), signal.SIGSEGV))
    with pytest.raises(CallCrashed, match="signal 40"):
        result_of(pool, lambda: os.kill(os.getpid(), 40))


def test_time_in_the_queue_does_not_count_against_the_deadline() -> None:
    with ProcessPool(1) as pool:
        first = pool.submit(signal.pause, timeout_seconds=1.0)
        second = pool.submit(math.sqrt, (4.0,), timeout_seconds=SHORT_SECONDS)
        assert second.result(LONG_SECONDS) == 2.0
        assert isinstance(first.exception(LONG_SECONDS), CallTimeout)


def test_import_of_the_functions_module_does_not_count_against_the_deadline(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "import threading\nthreading.Event().wait(1.0)\ndef answer():\n    return 42\n"
    (tmp_path / "slow_to_import_module.py").write_text(slow)
    result_of(pool, os.getpid)
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_to_import_module  # type: ignore[import-not-found]

    assert result_of(pool, slow_to_import_module.answer, timeout_seconds=SHORT_SECONDS) == 42


def test_function_that_cannot_be_loaded_fails_its_own_call_only(pool: ProcessPool) -> None:
    broken = PackedFunction("gone.function", b"cgone_module\nfunction\n.", b"0" * 16)
    with pytest.raises(LoadFailed, match="gone_module") as caught:
        result_of(pool, broken)
    assert "ModuleNotFoundError" in caught.value.trace
    assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_load_that_never_ends_is_killed_at_its_own_limit() -> None:
    class Stuck:
        def __reduce__(self) -> tuple[Any, ...]:
            return signal.pause, ()

    with ProcessPool(1, load_seconds=2.0) as pool, pytest.raises(CallTimeout, match="to load"):
        result_of(pool, math.sqrt, Stuck())


def test_exception_carries_type_message_and_remote_traceback(pool: ProcessPool) -> None:
    with pytest.raises(CallFailed) as caught:
        result_of(pool, json.loads, "{")
    assert caught.value.kind == "JSONDecodeError"
    assert "Expecting property name" in caught.value.text
    assert "json/decoder.py" in caught.value.trace
    assert len(pool.pids()) == 1


def test_exit_of_the_interpreter_is_an_exception_like_any_other(pool: ProcessPool) -> None:
    with pytest.raises(CallFailed) as caught:
        result_of(pool, sys.exit, 7)
    assert caught.value.kind == "SystemExit"


def test_arguments_and_results_that_cannot_travel_are_refused(pool: ProcessPool) -> None:
    with pytest.raises(LoadFailed, match="its arguments cannot be sent"):
        result_of(pool, repr, threading.Lock())
    with pytest.raises(ResultRefused, match=r"returned no result .* cannot send lock .*; send plain values"):
        result_of(pool, threading.Lock)


def test_large_arguments_and_results_pass_whole(pool: ProcessPool) -> None:
    data = os.urandom(5_000_000)
    assert result_of(pool, bytes.join, b"", [data, data]) == data + data


def test_prints_and_reads_of_standard_streams_do_not_disturb_the_protocol(
    pool: ProcessPool, capfd: pytest.CaptureFixture[str]
) -> None:
    def chatty() -> str:
        print("to a person")
        os.write(1, b"raw bytes\n")
        return sys.stdin.read()

    assert result_of(pool, chatty) == ""
    captured = capfd.readouterr()
    assert "to a person" in captured.err
    assert "raw bytes" in captured.err
    assert captured.out == ""


def test_cancelling_a_queued_call_never_runs_it(tmp_path: Path) -> None:
    with ProcessPool(1) as pool:
        running = pool.submit(signal.pause, timeout_seconds=1.0)
        queued = pool.submit((tmp_path / "ran").touch, timeout_seconds=LONG_SECONDS)
        assert queued.cancel()
        assert isinstance(running.exception(LONG_SECONDS), CallTimeout)
        assert result_of(pool, math.sqrt, 4.0) == 2.0
    assert not (tmp_path / "ran").exists()


async def test_cancelling_a_running_call_kills_its_process_at_once(pool: ProcessPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")

    def announce_and_hang() -> None:
        (tmp_path / "started").write_text(str(os.getpid()))
        signal.pause()

    future = asyncio.wrap_future(pool.submit(announce_and_hang, timeout_seconds=LONG_SECONDS))
    pid = int(await asyncio.wait_for(asyncio.to_thread((tmp_path / "started").read_text), LONG_SECONDS))
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await future
    assert await asyncio.to_thread(ended_within, pid, 10.0)
    assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_memory_limit_fails_the_greedy_call_and_replaces_its_process() -> None:
    with ProcessPool(1, Limits(memory_bytes=512 << 20)) as pool:
        before = result_of(pool, os.getpid)
        with pytest.raises(CallExhausted, match="bytearray needs more memory than its process may have"):
            result_of(pool, bytearray, 1 << 30)
        assert result_of(pool, os.getpid) != before


def test_allocating_small_pieces_until_the_limit_is_told_from_other_crashes() -> None:
    def hoard(piece: int) -> None:
        import numpy as np

        kept = []
        while True:
            kept.append(np.ones(piece, dtype=np.uint8))

    with ProcessPool(1, Limits(memory_bytes=160 << 20)) as pool:
        for piece in (1 << 14, 1 << 24):
            with pytest.raises(CallExhausted):
                result_of(pool, hoard, piece)
        assert len(pool.pids()) == 1


def test_arguments_that_do_not_fit_in_memory_fail_their_own_call_only() -> None:
    with ProcessPool(1, Limits(memory_bytes=64 << 20)) as pool:
        large = pool.submit(len, (bytes(100 << 20),), timeout_seconds=LONG_SECONDS)
        assert result_of(pool, math.sqrt, 4.0) == 2.0
        assert isinstance(large.exception(LONG_SECONDS), CallExhausted)


def test_fork_inside_a_call_neither_answers_for_it_nor_hides_its_end(pool: ProcessPool) -> None:
    def fork_and_crash() -> None:
        if os.fork() == 0:
            signal.pause()
        os._exit(5)

    def fork_and_return() -> int:
        return os.fork() and 1

    with pytest.raises(CallCrashed, match="exit status 5"):
        result_of(pool, fork_and_crash)
    assert result_of(pool, fork_and_return) == 1
    assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_nonsense_in_the_channel_is_a_crash() -> None:
    def scribble() -> None:
        for descriptor in os.listdir("/proc/self/fd"):
            if int(descriptor) > 2 and "socket:" in os.path.realpath(f"/proc/self/fd/{descriptor}"):
                os.write(int(descriptor), b"nonsense" * 100)

    with ProcessPool(1) as pool:
        with pytest.raises(CallCrashed):
            result_of(pool, scribble)
        assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_cpu_limit_ends_a_busy_call_and_is_counted_per_call() -> None:
    with ProcessPool(1, Limits(cpu_seconds=1.0)) as pool:
        assert result_of(pool, math.sqrt, 4.0) == 2.0
        with pytest.raises(CallCrashed, match="SIGXCPU"):
            result_of(pool, spin)
        assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_what_a_killed_call_started_is_killed_with_it(pool: ProcessPool, tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def start_and_hang() -> None:
        note.write_text(str(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid))
        signal.pause()

    with pytest.raises(CallTimeout):
        result_of(pool, start_and_hang, timeout_seconds=1.0)
    assert ended_within(int(note.read_text()), 10.0)


def test_process_killed_while_idle_costs_no_call(pool: ProcessPool) -> None:
    pid = result_of(pool, os.getpid)
    os.kill(pid, signal.SIGKILL)
    assert result_of(pool, math.sqrt, 4.0) == 2.0


def test_close_fails_running_and_queued_calls_and_ends_every_process() -> None:
    pool = ProcessPool(1)
    pid = result_of(pool, os.getpid)
    running = pool.submit(signal.pause, timeout_seconds=LONG_SECONDS)
    queued = pool.submit(math.sqrt, (4.0,), timeout_seconds=LONG_SECONDS)
    pool.close()
    pool.close()
    assert isinstance(running.exception(LONG_SECONDS), PoolClosed)
    assert isinstance(queued.exception(LONG_SECONDS), PoolClosed)
    assert ended_within(pid, 0.0)
    with pytest.raises(PoolClosed, match="closed process pool"):
        result_of(pool, math.sqrt, 4.0)


def test_dropping_the_pool_ends_its_processes() -> None:
    pool = ProcessPool(1)
    pid = result_of(pool, os.getpid)
    del pool
    assert ended_within(pid, 10.0)


def test_impossible_sizes_and_deadlines_are_refused() -> None:
    with pytest.raises(ValueError, match="size >= 1, got 0"):
        ProcessPool(0)
    with ProcessPool(1) as pool, pytest.raises(ValueError, match="timeout_seconds must be > 0, got 0"):
        pool.submit(math.sqrt, (4.0,), timeout_seconds=0)


def importing_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run_script(directory: Path, text: str) -> "subprocess.Popen[str]":
    (directory / "script.py").write_text(textwrap.dedent(text))
    command = [sys.executable, str(directory / "script.py")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=importing_environment())


def test_script_without_a_main_guard_works_and_exits_without_closing(tmp_path: Path) -> None:
    script = run_script(
        tmp_path,
        """
        from areal.utils.process_pool.pool import ProcessPool
        class Adder:
            def __init__(self, n): self.n = n
            def __call__(self, x): return x + self.n
        pool = ProcessPool(1)
        print(pool.submit(Adder(2), (3,), timeout_seconds=30).result(), *pool.pids(), flush=True)
        """,
    )
    output, _ = script.communicate(timeout=LONG_SECONDS)
    answer, pid = output.split()
    assert (script.returncode, answer) == (0, "5")
    assert ended_within(int(pid), 10.0)


def test_command_line_program_ends_while_calls_hang() -> None:
    program = """if True:
        import asyncio, math
        from areal.api.reward_api import AsyncRewardWrapper
        from areal.utils.process_pool.pool import ProcessPool
        def hang():
            while True: pass
        async def main():
            task = asyncio.create_task(AsyncRewardWrapper(hang, timeout_seconds=600, max_workers=2)())
            print(await AsyncRewardWrapper(math.sqrt, max_workers=2)(4.0))
        pool = ProcessPool(1)
        pool.submit(hang, timeout_seconds=600)
        asyncio.run(main())
    """
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG_SECONDS, env=importing_environment())
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2.0\n", "")


def test_processes_die_with_a_parent_that_is_killed_even_while_they_hang(tmp_path: Path) -> None:
    script = run_script(
        tmp_path,
        """
        import os, signal, time
        from areal.utils.process_pool.pool import ProcessPool
        pool = ProcessPool(2)
        def hang():
            print("hanging", flush=True)
            while True: pass
        pool.submit(os.getpid, timeout_seconds=30).result()
        pool.submit(hang, timeout_seconds=600)
        deadline = time.monotonic() + 60
        while len(pool.pids()) < 2 and time.monotonic() < deadline:
            pool.submit(os.getpid, timeout_seconds=30).result()
        print(*pool.pids(), flush=True)
        signal.pause()
        """,
    )
    assert script.stdout is not None
    pids = [int(pid) for pid in script.stdout.readline().split()]
    script.kill()
    script.wait(LONG_SECONDS)
    script.stdout.close()
    assert len(pids) == 2
    assert all(ended_within(pid, 10.0) for pid in pids)
