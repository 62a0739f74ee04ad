"""What a program may not do in the sandbox, tried for real under each kind of isolation."""

import os
import secrets
import select
import socket
from pathlib import Path

import pytest

from areal.api.errors import ConfigError, RewardTimeout
from areal.api.reward_api import AsyncRewardWrapper
from areal.reward.sandbox import ProgramRun, SandboxLimits, run_program

pytestmark = pytest.mark.slow

LIMITS = SandboxLimits(timeout_seconds=30)


class Sandbox:
    def __init__(self, isolation: str) -> None:
        self.isolation = isolation

    def run(self, text: str, stdin: str = "", limits: SandboxLimits = LIMITS) -> ProgramRun:
        run = run_program(text, stdin, limits, namespaces=self.isolation == "namespaces")
        assert run.isolation in (self.isolation, None), run.errors
        return run


@pytest.fixture(params=["namespaces", "guard"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "namespaces":
        need_namespaces()
    return Sandbox(request.param)


def need_namespaces() -> None:
    if run_program("").isolation != "namespaces":
        pytest.skip("this kernel, container or distribution does not let us make namespaces")


def processes_named(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def assert_they_end(word: str) -> None:
    """Wait, with a deadline, for the end of those that a signal is already on its way to."""
    for pid in processes_named(word):
        try:
            end = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([end], [], [], 20)[0], f"process {pid} outlived its sandbox"
        finally:
            os.close(end)


def test_a_program_reads_its_input_and_its_output_and_status_come_back(sandbox: Sandbox) -> None:
    text = "import sys\nprint(sum(map(int, input().split())), __name__, 'é')\nprint('oh', file=sys.stderr)\nsys.exit(3)"
    run = sandbox.run(text, "3 4\n")
    assert (run.status, run.output, run.errors) == (3, "7 __main__ é\n", "oh\n")


def test_ordinary_programs_find_the_standard_library_threads_and_a_place_to_write(sandbox: Sandbox) -> None:
    text = """
import asyncio, bisect, collections, dataclasses, decimal, fractions, functools, heapq, itertools, json, math, random
import re, sys, threading
from pathlib import Path
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 26)
said = []
thread = threading.Thread(target=lambda: said.append(dataclasses.make_dataclass("A", ["x"])(3).x))
thread.start()
thread.join()
Path("note").write_text("kept")
print(said, open("note").read(), collections.namedtuple("B", "y")(4).y)
"""
    run = sandbox.run(text)
    assert (run.status, run.output) == (0, "[3] kept 4\n"), run.errors


def test_no_network_not_even_to_this_machine(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        text = f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)\n"
        run = sandbox.run(text + "except OSError as error:\n    print('refused')")
        assert run.output == "refused\n", run.errors
        with pytest.raises(BlockingIOError):
            server.accept()


def test_no_secret_of_ours_is_in_its_environment_or_within_its_reach(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUR_API_KEY", "sk-secret")
    (tmp_path / "token").write_text("sk-secret")
    text = f"""
import glob, os
found = [name for name in os.environ if name not in ("LC_CTYPE",)]
for path in [*glob.glob("/proc/[0-9]*/environ"), {str(tmp_path / "token")!r}, "/etc/passwd"]:
    try:
        found.append(open(path).read())
    except OSError:
        pass
print(found)
"""
    assert sandbox.run(text).output == "[]\n"


def test_nothing_outside_its_directory_can_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    new, kept = str(tmp_path / "new"), str(tmp_path / "kept")
    for action in (f"open({new!r}, 'w')", f"os.mkdir({new!r})", f"os.remove({kept!r})", f"os.rename({kept!r}, 'mine')"):
        assert sandbox.run(f"import os\n{action}").status != 0
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_no_other_process_can_be_signalled(sandbox: Sandbox) -> None:
    assert sandbox.run(f"import os\nos.kill({os.getpid()}, 0)").status != 0


def test_processes_are_bounded_and_end_with_the_program(sandbox: Sandbox) -> None:
    text = """
import os, signal
started = 0
try:
    while started < 100:
        if os.fork() == 0:
            signal.pause()
        started += 1
except OSError:
    print(started)
"""
    run = sandbox.run(text)
    assert run.status == 0
    assert int(run.output) < LIMITS.processes


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    run = sandbox.run("try:\n    bytearray(10 << 30)\nexcept MemoryError:\n    print('no more')")
    assert run.output == "no more\n"


def test_output_is_bounded(sandbox: Sandbox) -> None:
    run = sandbox.run("while True: print('x' * 1000)", limits=SandboxLimits(30, output_bytes=100_000))
    assert run.status not in (0, None)
    assert len(run.output) == 100_000


def test_a_program_that_never_ends_is_killed(sandbox: Sandbox) -> None:
    assert sandbox.run("while True: pass", limits=SandboxLimits(1)).status is None


def test_what_a_program_started_is_killed_with_it() -> None:
    need_namespaces()
    word = f"9{secrets.randbelow(10**12):012d}"
    text = f"import subprocess\nfor _ in 'ab': subprocess.Popen(['sleep', '{word}'], start_new_session=True)\n"
    assert run_program(text, limits=LIMITS).status == 0
    assert_they_end(word)
    assert run_program(text + "while True: pass", limits=SandboxLimits(1)).status is None
    assert_they_end(word)


def sleep_in_a_sandbox(word: str) -> None:
    run_program(f"import os\nos.execvp('sleep', ['sleep', '{word}'])", limits=SandboxLimits(600))


async def test_a_program_ends_with_the_reward_process_that_runs_it() -> None:
    need_namespaces()
    word = f"9{secrets.randbelow(10**12):012d}"
    with pytest.raises(RewardTimeout):
        await AsyncRewardWrapper(sleep_in_a_sandbox, timeout_seconds=1)(word)
    assert_they_end(word)


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="memory_bytes must be > 0, got 0"):
        SandboxLimits(memory_bytes=0)


def test_nothing_is_left_on_disk(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sandbox.run("open('a', 'w').write('b')")
    assert list(tmp_path.iterdir()) == []
