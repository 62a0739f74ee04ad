"""What is done to a process before it becomes a program: its user, its limits, its end, and the files that it sees."""

import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import NamedTuple

from . import kernel

SYSTEM_DIRECTORIES = ("/usr", "/lib", "/lib64", "/bin", "/nix/store")
INSTALLATION_DIRECTORIES = ("bin", "lib", "lib64")
"""Of Python, which may be installed in someone's home."""
SYSTEM_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/urandom")


class Job(NamedTuple):
    timeout_seconds: float
    memory_bytes: int
    disk_bytes: int
    output_bytes: int
    processes: int
    open_files: int


def command(python: str, program: str) -> list[str]:
    return [python, "-I", "-S", "-X", "utf8", program]


def visible_directories() -> list[str]:
    """Those that Python needs; /usr holds most installations of it."""
    found = list(filter(os.path.isdir, SYSTEM_DIRECTORIES))
    for name in INSTALLATION_DIRECTORIES:
        path = os.path.join(sys.base_prefix, name)
        if os.path.isdir(path) and not any(os.path.commonpath([path, each]) == each for each in found):
            found.append(path)
    return found


def own_user() -> int:
    """A user id for one program alone, so that only its processes count; if this is not root, the present one."""
    if os.getuid() != 0:
        return os.getuid()
    for user in (2_000_000_000 + os.getpid(), 61_184 + os.getpid() % 4_336):  # the second range fits most containers
        try:
            os.setresuid(-1, user, -1)
        except OSError:
            continue  # a container that does not map it
        os.setresuid(-1, 0, -1)
        return user
    raise kernel.Refused("root may not become another user here, and programs never run as root")


def become_user(user: int, *, for_good: bool = True) -> None:
    """Lose every right. Raises rather than go on as root. `for_good=False` lets a program that is started have more
    rights than this process, as bubblewrap does in some distributions; it takes them from its own program."""
    for capability in range(64 if for_good else 0):
        if kernel.libc.prctl(kernel.PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last one, or not ours to drop: then no_new_privs has to do
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if 0 in (*os.getresuid(), *os.getresgid()):
        raise kernel.Refused("programs never run as root, and this process could not become another user")
    kernel.checked("capset", kernel.libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    if for_good:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def limit(job: Job, processes: int, file_bytes: int | None = None) -> None:
    """`file_bytes=None` is what the job says."""
    seconds = int(job.timeout_seconds) + 2
    for which, most in (
        (resource.RLIMIT_AS, job.memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_bytes or job.output_bytes),
        (resource.RLIMIT_NOFILE, job.open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (value, value))


def expose_to_out_of_memory_killer(proc: int) -> None:
    """If the machine runs out of memory, the program goes first."""
    with open(os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc), "w", encoding="ascii") as file:
        file.write("1000")


def copy(source: int, path: str) -> None:
    with open(path, "wb") as file:
        file.write(os.pread(source, os.fstat(source).st_size, 0))
    os.chmod(path, 0o644)


def open_to_all(path: str) -> bool:
    """Whether every user may go through the directories above it."""
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 1:
            return False
    return True


def mapped_files() -> list[str]:
    """The interpreter and the libraries that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.rstrip("\n")[line.index("/") :] for line in maps if "/" in line}
    return list(filter(os.path.isfile, paths))


def first_ready(*descriptors: int, seconds: float | None = None) -> int | None:
    """The first of them that can be read or has ended; None = the time is over."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    ready = {each for each, _ in poll.poll(None if seconds is None else min(seconds * 1000, 2**31 - 1))}
    return next((each for each in descriptors if each in ready), None)


def die_with_keeper(keeper: socket.socket) -> None:
    """To be called again after a change of user, which clears it."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if first_ready(keeper.fileno(), seconds=0) is not None:
        os._exit(1)  # the keeper ended before this call
