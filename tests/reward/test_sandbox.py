"""What a program may not do in the sandbox, tried for real under every kind of isolation that this machine has.

As root, the kinds are tried twice: started by root, and by an ordinary user, for whom the kernel's rules differ.
"""

import functools
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import ConfigError, RewardTimeout
from areal.api.reward_api import AsyncRewardWrapper
from areal.reward.sandbox import ORDER, ProgramRun, SandboxLimits, find_isolation, run_program
from areal.reward.sandbox.launcher import seccomp

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
LIMITS = SandboxLimits(timeout_seconds=30)
ORDINARY_USER = 61_111

AS_AN_ORDINARY_USER = """
import json, sys
from dataclasses import asdict
from areal.reward.sandbox import SandboxLimits, run_program
for line in sys.stdin:
    job = json.loads(line)
    run = run_program(job["text"], job["stdin"], SandboxLimits(**job["limits"]), isolation=job["kind"])
    print(json.dumps(asdict(run)), flush=True)
"""


class Sandbox:
    def __init__(self, kind: Any, user: int | None) -> None:
        self.kind = kind
        self.user = user
        """None = the user who runs the tests."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def allows_processes(self) -> bool:
        return bool(self.kind == "namespaces")

    def run(self, text: str, stdin: str = "", limits: SandboxLimits = LIMITS) -> ProgramRun:
        if self.user is None:
            return run_program(text, stdin, limits, isolation=self.kind)
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = self.start(AS_AN_ORDINARY_USER, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"text": text, "stdin": stdin, "limits": asdict(limits), "kind": self.kind}
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], 120)[0], "no answer"
        answer = self._process.stdout.readline().decode()
        if not answer.startswith("{"):
            raise ConfigError(answer + self._process.communicate(timeout=60)[0].decode())
        return ProgramRun(**json.loads(answer))

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)

    def start(self, text: str, **more: Any) -> "subprocess.Popen[bytes]":
        """A Python process of the user who starts programs."""
        if self.user is None:
            command, who = [sys.executable, "-c", text], {}
        else:
            command, who = ["/usr/bin/python3", "-c", text], {"user": self.user, "group": self.user, "extra_groups": []}
        environment = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "OUR_API_KEY": "sk-secret"}
        return subprocess.Popen(command, env=environment, cwd="/", **who, **more)


@functools.cache
def why_not(kind: Any) -> str | None:
    try:
        find_isolation(kind)
    except ConfigError as error:
        return str(error)
    return None


EVERYWHERE = [(kind, user) for user in (None, ORDINARY_USER) for kind in ORDER]


@pytest.fixture(scope="module", params=EVERYWHERE, ids=[f"{kind}-{user or 'self'}" for kind, user in EVERYWHERE])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox = Sandbox(*request.param)
    if sandbox.user is None and (reason := why_not(sandbox.kind)):
        pytest.skip(reason)
    if sandbox.user is not None and os.getuid() != 0:
        pytest.skip("these tests do not run as root, so the user is an ordinary one anyway")
    if sandbox.user is not None and not os.path.exists("/usr/bin/python3"):
        pytest.skip("there is no Python that every user may read")
    try:
        sandbox.run("")
    except ConfigError as error:
        pytest.skip(str(error)[-1000:])
    yield sandbox
    sandbox.close()


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory that file permissions protect from no one."""
    directory = Path(tempfile.mkdtemp(prefix="areal-outside-"))
    try:
        directory.chmod(0o777)
        for name in ("secret", "kept"):
            (directory / name).write_text("sk-secret\n")
            (directory / name).chmod(0o666)
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def bystander(sandbox: Sandbox) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of the same user, which must live."""
    process = sandbox.start("import signal; signal.pause()")
    try:
        yield process
        assert process.poll() is None, "the program reached another process"
    finally:
        process.kill()
        process.wait(30)


def a_word() -> str:
    """To be found on the command line of a process."""
    return f"9{secrets.randbelow(10**12):012d}"


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
        wait_for_end(end)


def parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
    return found


def descendants(pid: int) -> list[int]:
    of = parents()
    found = [pid]
    for each in found:
        found += [child for child, parent in of.items() if parent == each]
    return found[1:]


def wait_for_end(end: int) -> None:
    """Of a process, given by a descriptor."""
    try:
        assert select.select([end], [], [], 30)[0], "a process outlived its sandbox"
    finally:
        os.close(end)


def test_this_machine_has_at_least_one_kind_of_isolation() -> None:
    assert find_isolation() in ORDER


# What a program may do


def test_a_program_reads_its_input_and_its_output_and_status_come_back(sandbox: Sandbox) -> None:
    text = "import sys\nprint(sum(map(int, input().split())), __name__, 'é')\nprint('oh', file=sys.stderr)\nsys.exit(3)"
    run = sandbox.run(text, "3 4\n")
    assert (run.status, run.output, run.errors) == (3, "7 __main__ é\n", "oh\n")
    assert run.isolation == sandbox.kind


def test_ordinary_programs_find_the_standard_library_threads_and_event_loops(sandbox: Sandbox) -> None:
    text = """
import asyncio, bisect, collections, dataclasses, decimal, fractions, functools, heapq, itertools, json, math, random
import re, sys, threading, os
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 26)
said = []
thread = threading.Thread(target=lambda: said.append(dataclasses.make_dataclass("A", ["x"])(3).x))
thread.start()
thread.join()
async def main():
    return await asyncio.to_thread(len, "four")
print("quiet", file=open(os.devnull, "w"))
print(said, asyncio.run(main()), collections.namedtuple("B", "y")(4).y)
"""
    run = sandbox.run(text)
    assert (run.status, run.output) == (0, "[3] 4 4\n"), run.errors


def test_files_and_processes_of_its_own_exist_in_namespaces_only(sandbox: Sandbox) -> None:
    text = """
import subprocess, sys
open("note", "w").write("kept")
print(open("note").read(), subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout)
"""
    run = sandbox.run(text)
    assert (run.status == 0) == sandbox.allows_processes, run.errors
    if sandbox.allows_processes:
        assert run.output == "kept 7\n\n"


def test_a_program_that_is_longer_than_its_limits_for_files_runs(sandbox: Sandbox) -> None:
    limits = SandboxLimits(30, output_bytes=1000, disk_bytes=4096)
    assert sandbox.run("#" * 200_000 + "\nprint(7)", limits=limits).output == "7\n"


def test_it_has_no_open_files_but_its_streams_its_text_and_its_python(sandbox: Sandbox) -> None:
    text = """
import os
found = []
for number in range(3, 1000):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(found)
"""
    expected = {"landlock": ("[3]\n", "[3, 4]\n")}.get(sandbox.kind, ("[]\n",))
    assert sandbox.run(text).output in expected


# What it may not see


READS = {
    "the usual way": "print(open(SECRET).read())",
    "with os.path.realpath replaced": "os.path.realpath = lambda path, **_: os.getcwd()\nprint(open(SECRET).read())",
    "through readline": "import readline\nreadline.read_history_file(SECRET)\nprint(readline.get_history_item(1))",
    "by a process of re-imported _posixsubprocess": """
sys.modules.pop("_posixsubprocess", None)
import _posixsubprocess, subprocess
class QuietSystem:
    audit = staticmethod(lambda *_: None)
    __getattr__ = staticmethod(lambda name: getattr(sys, name))
subprocess.sys = QuietSystem()
subprocess._fork_exec = _posixsubprocess.fork_exec
print(subprocess.run(["cat", SECRET], capture_output=True, text=True).stdout)
""",
    "through the globals of the frames below": """
frame = sys._getframe()
while frame:
    for name in list(frame.f_globals):
        if name in ("_below", "_writes"):
            frame.f_globals[name] = lambda *_: name == "_below"
    frame = frame.f_back
print(open(SECRET).read())
""",
    "through ctypes": """
import ctypes
libc = ctypes.CDLL(None)
file = libc.open(SECRET.encode(), 0)
print(os.read(file, 100))
""",
    "through /proc": "print(open('/proc/self/root' + SECRET).read())",
    "by a link": "os.symlink(SECRET, 'link')\nprint(open('link').read())",
    "from a directory above": "os.chdir(os.path.dirname(SECRET))\nprint(open('secret').read())",
}


@pytest.mark.parametrize("way", READS)
def test_no_file_of_others_can_be_read(sandbox: Sandbox, outside: Path, way: str) -> None:
    run = sandbox.run(f"import os, sys\nSECRET = {str(outside / 'secret')!r}\n{READS[way]}")
    assert "sk-secret" not in run.output + run.errors


def test_no_secret_is_in_its_environment_or_in_that_of_other_processes(
    sandbox: Sandbox, bystander: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_API_KEY", "sk-secret")
    text = f"""
import glob, os
found = [name for name in os.environ if name not in ("LC_CTYPE", "LD_LIBRARY_PATH", "PWD")]
paths = ["/proc/{bystander.pid}/environ", "/proc/{os.getpid()}/environ", "/proc/self/environ", "/etc/passwd"]
paths += [*glob.glob("/proc/[0-9]*/environ"), os.path.expanduser("~/.ssh/id_rsa"), "/root/.bashrc"]
for path in paths:
    try:
        found.append(open(path).read())
    except OSError:
        pass
for directory in ("/root", "/home", "/tmp", "/etc", os.path.expanduser("~")):
    try:
        found += os.listdir(directory)
    except OSError:
        pass
print([each for each in found if each not in ("ld.so.cache", ".pyenv")])
"""
    assert sandbox.run(text).output == "[]\n"


# What it may not reach


def test_no_network_not_even_to_this_machine(sandbox: Sandbox, outside: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letters,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        named.bind(str(outside / "named"))
        letters.bind(str(outside / "letters"))
        for name in ("named", "letters"):
            (outside / name).chmod(0o777)
        abstract_name = f"\0areal-{a_word()}"
        abstract.bind(abstract_name)
        for each in (named, abstract):
            each.listen()
        for each in (server, named, letters, abstract):
            each.setblocking(False)
        text = f"""
import ctypes, socket
def attempt(action):
    try:
        action()
        print("reached")
    except OSError:
        pass
attempt(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 5))
attempt(lambda: socket.socket(socket.AF_UNIX).connect({str(outside / "named")!r}))
attempt(lambda: socket.socket(socket.AF_UNIX).connect({abstract_name!r}))
attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", {str(outside / "letters")!r}))
attempt(lambda: socket.socketpair()[0].sendto(b"x", {str(outside / "letters")!r}))
attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
print(ctypes.CDLL(None).syscall(425, 1, bytes(256)))
"""
        run = sandbox.run(text)
        assert (run.status, run.output) == (0, "-1\n"), run.errors
        for each in (server, named, abstract):
            with pytest.raises(BlockingIOError):
                each.accept()
        with pytest.raises(BlockingIOError):
            letters.recv(10)


WRITES = [
    "open(new, 'w')",
    "os.mkdir(new)",
    "os.remove(kept)",
    "os.rename(kept, 'mine')",
    "os.link(kept, new)",
    "os.symlink(kept, new)",
    "os.truncate(kept, 0)",
    "os.open(kept, os.O_RDONLY | os.O_TRUNC)",
    "os.chmod(kept, 0)",
    "os.utime(kept, (1, 1))",
    "os.setxattr(kept, 'user.a', b'b')",
    "__import__('readline').write_history_file(new)",
    "__import__('sqlite3').connect(new).execute('create table a (b)')",
    "open('/tmp/areal-new', 'w')",
    "open('/dev/shm/areal-new', 'w')",
    "open('/proc/self/oom_score_adj', 'w')",
    "open('/proc/sys/kernel/core_pattern', 'w')",
    "os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR)",
]


@pytest.mark.parametrize("action", WRITES)
def test_nothing_outside_its_directory_can_be_changed(sandbox: Sandbox, outside: Path, action: str) -> None:
    if sandbox.user is not None:
        shutil.chown(outside / "kept", sandbox.user)
    before = os.stat(outside / "kept")
    run = sandbox.run(f"import os\nnew, kept = {str(outside / 'new')!r}, {str(outside / 'kept')!r}\n{action}")
    assert run.status not in (0, None)
    assert sorted(file.name for file in outside.iterdir()) == ["kept", "secret"]
    assert os.stat(outside / "kept") == before or action.startswith("open(kept")
    assert not os.path.exists("/tmp/areal-new")
    assert not os.path.exists("/dev/shm/areal-new")


@pytest.mark.parametrize(
    "action",
    [
        "os.kill(victim, 9)",
        "os.kill(-1, 9)",
        "os.kill(0, 9)",
        "os.killpg(os.getpgid(0), 9)",
        "os.kill(os.getppid(), 9)",
        "os.kill(1, 9)",
        "signal.pidfd_send_signal(os.pidfd_open(victim), 9)",
        "resource.prlimit(victim, resource.RLIMIT_CPU, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, victim, 19)",
        "libc.ptrace(16, victim, 0, 0)",
        "libc.syscall(200, victim, 9)",
        """
ends = socket.socketpair()
fcntl.fcntl(ends[0], fcntl.F_SETOWN, victim)
fcntl.fcntl(ends[0], 10, 9)
fcntl.fcntl(ends[0], fcntl.F_SETFL, os.O_ASYNC)
ends[1].send(b"x")
""",
    ],
)
def test_no_other_process_can_be_reached(sandbox: Sandbox, bystander: "subprocess.Popen[bytes]", action: str) -> None:
    text = "import ctypes, fcntl, os, resource, signal, socket\nlibc = ctypes.CDLL(None)\n"
    run = sandbox.run(f"{text}victim = {bystander.pid}\n{action}")
    assert run.isolation == sandbox.kind  # the sandbox itself has survived and reported
    if "victim)" in action or "(0, " in action:
        assert run.status != 0
    assert os.getpriority(os.PRIO_PROCESS, bystander.pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_it_has_no_rights_and_cannot_get_any(sandbox: Sandbox) -> None:
    text = """
import ctypes, os, struct
libc = ctypes.CDLL(None)
capabilities = ctypes.create_string_buffer(24)
libc.capget(struct.pack("Ii", 0x20080522, 0), capabilities)
users = [*os.getresuid(), *os.getresgid(), *os.getgroups()]
attempts = [libc.setuid(0), libc.setgid(0), libc.unshare(0x10000000), libc.mount(b"a", b"/", b"tmpfs", 0, 0)]
print(0 in users, any(capabilities.raw), attempts, libc.prctl(39, 0, 0, 0, 0))
"""
    assert sandbox.run(text).output == "False False [-1, -1, -1, -1] 1\n"


def test_nothing_can_be_left_in_shared_memory(sandbox: Sandbox) -> None:
    text = """
import ctypes, os
from multiprocessing import shared_memory
libc = ctypes.CDLL(None)
print(libc.shmget(77, 4096, 0o1666), libc.msgget(77, 0o1666), libc.semget(77, 1, 0o1666), libc.memfd_create(b"a", 0))
shared_memory.SharedMemory("areal-left", create=True, size=10)
"""
    run = sandbox.run(text)
    assert run.output == "-1 -1 -1 -1\n"
    assert run.status != 0
    assert not os.path.exists("/dev/shm/areal-left")


# What it may not use up


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
    assert int(run.output) < LIMITS.processes if sandbox.allows_processes else run.output == "0\n"


def test_a_fork_bomb_is_over_at_the_deadline(sandbox: Sandbox) -> None:
    word = a_word()
    text = f"""
import os, sys
bomb = '''import os
while True:
    try:
        os.fork()
    except OSError:
        pass
'''
os.execv(sys.executable, [sys.executable, "-c", bomb, "{word}"])
"""
    assert sandbox.run(text, limits=SandboxLimits(1)).status is None
    assert processes_named(word) == []


def test_threads_are_bounded(sandbox: Sandbox) -> None:
    text = """
import threading
threading.stack_size(1 << 15)
lock = threading.Lock()
lock.acquire()
started = 0
try:
    while started < 100_000:
        threading.Thread(target=lock.acquire, daemon=True).start()
        started += 1
except (RuntimeError, MemoryError):
    print(started, flush=True)
__import__("os")._exit(0)
"""
    run = sandbox.run(text)
    assert int(run.output) < 20_000
    if sandbox.allows_processes:
        assert int(run.output) < LIMITS.processes


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    run = sandbox.run("try:\n    bytearray(10 << 30)\nexcept MemoryError:\n    print('no more')")
    assert run.output == "no more\n"
    assert sandbox.run("kept = []\nwhile True: kept.append(bytearray(1 << 20))").status not in (0, None)


def test_the_disk_is_bounded_in_total(sandbox: Sandbox) -> None:
    text = """
import itertools, os
total = 0
try:
    for number in itertools.count():
        with open(f"file{number}", "wb", buffering=0) as file:
            total += file.write(bytes(1 << 16))
except OSError as error:
    print(total)
"""
    run = sandbox.run(text, limits=SandboxLimits(30, disk_bytes=1 << 20))
    assert run.status == 0
    assert int(run.output) <= 1 << 20
    empty = text.replace("bytes(1 << 16)", "b''").replace("print(total)", "print(number)")
    assert int(sandbox.run(empty).output) <= 4096


def test_output_is_bounded(sandbox: Sandbox) -> None:
    run = sandbox.run("while True: print('x' * 1000)", limits=SandboxLimits(30, output_bytes=100_000))
    assert run.status not in (0, None)
    assert len(run.output) == 100_000


def test_a_program_that_never_ends_is_killed(sandbox: Sandbox) -> None:
    text = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"
    assert sandbox.run(text, limits=SandboxLimits(1)).status is None


def test_a_program_that_closes_everything_still_ends(sandbox: Sandbox) -> None:
    assert sandbox.run("import os\nos.closerange(0, 1000)\nos._exit(5)").status == 5


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="memory_bytes must be > 0, got 0"):
        SandboxLimits(memory_bytes=0)


# What remains of it


DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execv(sys.executable, [sys.executable, "-c", "import signal; signal.pause()", "{word}"])
    os._exit(0)
os.wait()
"""


def test_daemons_end_with_the_program(sandbox: Sandbox) -> None:
    if not sandbox.allows_processes:
        assert sandbox.run(DAEMON).status != 0
        return
    word = a_word()
    assert sandbox.run(DAEMON.format(word=word)).status == 0
    assert processes_named(word) == []
    assert sandbox.run(DAEMON.format(word=word) + "while True: pass", limits=SandboxLimits(1)).status is None
    assert processes_named(word) == []


def left_on_disk() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("areal-program-*"))


def test_nothing_is_left_on_disk(sandbox: Sandbox) -> None:
    before = left_on_disk()
    sandbox.run("open('a', 'w').write('b')")
    assert left_on_disk() <= before


NEVER_ENDING = """
import os, sys
os.execv(sys.executable, [sys.executable, "-c", "while True: pass", sys.stdin.read()])
"""


@pytest.mark.parametrize("kind", [*ORDER, "none"])
def test_a_caller_that_is_killed_leaves_no_process_and_no_file(kind: Any) -> None:
    if kind != "none" and (reason := why_not(kind)):
        pytest.skip(reason)
    word = a_word()
    before = left_on_disk()
    call = f"from areal.reward.sandbox import *\nimport sys\nrun_program({NEVER_ENDING!r}, sys.stdin.read(), "
    call += f"limits=SandboxLimits(600), isolation={kind!r})"
    caller = subprocess.Popen([sys.executable, "-c", call], stdin=subprocess.PIPE, cwd=REPOSITORY)
    try:
        assert caller.stdin is not None
        caller.stdin.write(word.encode())
        caller.stdin.close()
        deadline = time.monotonic() + 60
        while not processes_named(word):
            assert time.monotonic() < deadline
        ends = [os.pidfd_open(pid) for pid in descendants(caller.pid)]
    finally:
        caller.kill()
        caller.wait(30)
    assert len(ends) >= 3  # launcher, keeper, program
    for end in ends:
        wait_for_end(end)
    assert processes_named(word) == []
    assert left_on_disk() <= before


async def test_a_program_ends_with_the_reward_process_that_runs_it() -> None:
    word = a_word()
    with pytest.raises(RewardTimeout):
        await AsyncRewardWrapper(never_ending, timeout_seconds=3)(word)
    assert_they_end(word)


def never_ending(word: str) -> None:
    run_program(NEVER_ENDING, word, limits=SandboxLimits(600))


async def test_the_calls_of_a_reward_process_share_a_launcher() -> None:
    wrapper = AsyncRewardWrapper(launcher_of_this_process, timeout_seconds=60, max_workers=1)
    assert await wrapper() == await wrapper()


def launcher_of_this_process() -> int:
    isolation = run_program("print(7)").isolation
    found = processes_named(f'"isolation": "{isolation}", "caller": {os.getpid()}')
    (pid,) = [pid for pid in found if parents().get(pid) == os.getpid()]
    return pid


def test_a_launcher_that_was_killed_is_replaced() -> None:
    pid = launcher_of_this_process()
    end = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(end)
    assert run_program("print(7)").output == "7\n"


def test_a_forked_process_has_a_launcher_of_its_own() -> None:
    run_program("print(7)")
    child = os.fork()
    if child == 0:
        os._exit(0 if run_program("print(8)").output == "8\n" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run_program("print(9)").output == "9\n"


# Machines that cannot isolate


def test_without_isolation_it_refuses_and_says_why_and_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)namespaces: no; bubblewrap: no; landlock: no.*install bubblewrap"
    ) as raised:
        find_isolation(why_not=lambda kind: "no")
    assert 'isolation="none" runs them without any protection' in str(raised.value)


def test_the_first_kind_that_works_is_used_and_another_can_be_asked_for() -> None:
    assert find_isolation(why_not=lambda kind: None) == "namespaces"
    assert find_isolation(why_not=lambda kind: None if kind == "landlock" else "no") == "landlock"
    assert find_isolation("bubblewrap", why_not=lambda kind: None) == "bubblewrap"
    with pytest.raises(ConfigError, match="isolation='namespaces' does not work here"):
        find_isolation("namespaces", why_not=lambda kind: None if kind == "landlock" else "no")
    with pytest.raises(
        ConfigError, match="isolation must be one of auto, namespaces, bubblewrap, landlock, none, got 'x'"
    ):
        find_isolation("x")  # type: ignore[arg-type]


def test_no_isolation_works_when_it_is_asked_for_by_name_and_never_as_root() -> None:
    run = run_program("import os\nopen('note', 'w')\nprint(os.getuid(), os.path.exists('/etc'))", isolation="none")
    user, sees_everything = run.output.split()
    assert (int(user) != 0, sees_everything, run.isolation) == (True, "True", "none")


def on_a_kernel_that_forbids_isolation(text: str) -> "subprocess.CompletedProcess[str]":
    """Run Python where the kernel refuses new namespaces and has no Landlock, as in a strict container."""
    unshare, clone = {"x86_64": (272, 56), "aarch64": (97, 220)}[os.uname().machine]
    landlock_create_ruleset = 444
    start = f"""
from areal.reward.sandbox.launcher import kernel, seccomp as l
steps = l._instruction(l._LOAD, l._NUMBER)
for number in {(unshare, landlock_create_ruleset)}:
    steps += l._instruction(l._EQUAL, number, if_false=1) + l._instruction(l._RETURN, l._REFUSE)
check = l._argument_lacks(0, l._ALL_NAMESPACES) + l._instruction(l._RETURN, l._ALLOW)
steps += l._instruction(l._EQUAL, {clone}, if_false=4) + check
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
l.install(steps + l._instruction(l._RETURN, l._ALLOW))
from areal.reward import code_reward
program, tests = "print(7)", [{{"input": "", "output": "7"}}]
"""
    return subprocess.run(
        [sys.executable, "-c", start + text], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )


def test_code_reward_refuses_on_a_kernel_that_forbids_isolation() -> None:
    done = on_a_kernel_that_forbids_isolation("code_reward('', program, [], [], tests=tests)")
    assert done.returncode == 1
    for part in ("ConfigError: ", "namespaces: unshare: Operation not permitted", "landlock: ", "install bubblewrap"):
        assert part in done.stderr


def test_a_workflow_with_code_reward_is_refused_there_before_its_first_episode() -> None:
    make = "from functools import partial\nfrom areal.api.reward_api import AsyncRewardWrapper\n"
    make += "AsyncRewardWrapper(partial(code_reward, isolation='none'))\nprint('made')\nAsyncRewardWrapper(code_reward)"
    done = on_a_kernel_that_forbids_isolation(make)
    assert (done.returncode, done.stdout) == (1, "made\n")
    assert "ConfigError: programs of a model run only where the kernel isolates them" in done.stderr


def test_code_reward_runs_there_without_isolation_if_that_is_asked_for_by_name() -> None:
    done = on_a_kernel_that_forbids_isolation("print(code_reward('', program, [], [], tests=tests, isolation='none'))")
    assert done.stdout == "1.0\n", done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try to run a program as root")
def test_root_that_cannot_become_another_user_is_refused() -> None:
    text = """
from areal.reward.sandbox.launcher import kernel, seccomp as l
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
number = {"x86_64": 117, "aarch64": 147}[l.os.uname().machine]
steps = l._instruction(l._LOAD, l._NUMBER) + l._instruction(l._EQUAL, number, if_false=1)
l.install(steps + l._instruction(l._RETURN, l._REFUSE) + l._instruction(l._RETURN, l._ALLOW))
from areal.reward.sandbox import run_program
print(run_program("print(7)", isolation="none"))
"""
    done = subprocess.run([sys.executable, "-c", text], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "programs never run as root" in done.stderr


def test_the_filter_names_system_calls_by_the_numbers_of_the_kernel() -> None:
    headers = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")]
    if not all(header.exists() for header in headers):
        pytest.skip("the kernel's headers are not installed")
    tables = [seccomp._REFUSED, seccomp._REFUSED_TO_ONE_PROCESS, seccomp._REFUSED_BESIDE_OTHERS, seccomp._CHECKED]
    for column, header in enumerate(headers):
        defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", header.read_text())
        known = {name: int(number) for name, number in defined}
        assert seccomp._numbers(" ".join(tables), column).items() <= known.items()
