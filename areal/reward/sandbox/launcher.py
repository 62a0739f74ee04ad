"""Starts one program inside a sandbox and reports how it ended.

It imports nothing of this package: it is run with `-I -S`.

Where the kernel permits it, the program gets namespaces of its own: no network, no other processes, and a file system
that holds the Python installation, read-only, and one empty directory. Elsewhere it runs under `guard.py`.
The limits hold either way, and killing this process ends everything that it started.

Its processes: this one, which waits; in namespaces their init, which reaps; the program.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

PROGRAM = "main.py"
SYSTEM_DIRECTORIES = ("/usr", "/lib", "/lib64", "/bin")
SYSTEM_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/urandom")
SCRATCH_BYTES = 64 << 20
NOBODY = 65534
FIRST_OWN_USER = 2_000_000_000
"""Started by root, each sandbox gets a user id of its own, so that only its own processes count."""

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mount, UTS, IPC, PID, network
_NEW_USER = 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_MOUNT_ATTR_LOCKED = 1 | 2 | 4  # read-only, no set-user-id, no devices

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    job = json.loads(sys.argv[1])
    os.set_inheritable(job["report"], False)
    _die_with_parent()
    if os.getppid() != job["parent"]:
        return  # the parent has already ended
    with open(PROGRAM, "rb") as file:
        text = file.read()
    own_user = _own_user()
    isolated = job["namespaces"] and _entered_namespaces(job["scratch"], own_user)
    _die_with_parent()  # a change of user clears it
    with open(PROGRAM, "wb") as file:
        file.write(text)
    status = _run(job, isolated, own_user)
    os.write(job["report"], json.dumps([status, "namespaces" if isolated else "guard"]).encode())


def _run(job: dict[str, Any], isolated: bool, own_user: int | None) -> int:
    """The program's exit status; raises if it could not be started."""
    trouble, writer = os.pipe()  # closed by a successful exec
    child = os.fork()
    if child == 0:
        try:
            _become_program(job, isolated, own_user)
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(1)
    os.close(writer)
    with open(trouble, "rb") as file:
        failure = file.read().decode()
    if failure:
        raise RuntimeError(f"the program could not be started: {failure}")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become_program(job: dict[str, Any], isolated: bool, own_user: int | None) -> NoReturn:
    if isolated:
        _die_with_parent()
        _fork_from_init()
    counted = isolated
    if own_user is not None and os.getuid() == 0 and (isolated or _can_start_python(own_user)):
        _become_user(own_user)
        counted = True
    _die_with_parent()
    _require(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _set_limits(job, count_processes=counted)
    command = [PROGRAM] if isolated else ["-c", job["guard"], PROGRAM, os.path.dirname(os.__file__), sys.base_prefix]
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-X", "utf8", *command])


def _die_with_parent() -> None:
    _require(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def _own_user() -> int | None:
    """A user id that no one else has; None if this is not root, or its container cannot map such an id."""
    if os.getuid() != 0:
        return None
    try:
        os.chown(".", FIRST_OWN_USER + os.getpid(), -1)
    except OSError:
        return None
    return FIRST_OWN_USER + os.getpid()


def _entered_namespaces(scratch: str, own_user: int | None) -> bool:
    user, group = os.getuid(), os.getgid()
    try:
        if own_user is None or _libc.unshare(_NEW_NAMESPACES) != 0:
            _require(_libc.unshare(_NEW_NAMESPACES | _NEW_USER))
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
            _write("/proc/self/gid_map", f"{NOBODY} {group} 1")
        _build_root(scratch)
        os.chroot(scratch)
        os.chdir("/scratch")
    except OSError:  # a container or a distribution that forbids one of them
        return False
    return True


def _build_root(root: str) -> None:
    """Make `root` a file system with only what Python needs, visible to this process and its children alone."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={SCRATCH_BYTES},nr_inodes=4096,mode=755")
    os.mkdir(f"{root}/scratch")
    for directory in (*SYSTEM_DIRECTORIES, sys.base_prefix):
        place = root + directory
        if os.path.lexists(place) or not os.path.isdir(directory):
            continue  # /usr holds most installations of Python
        if os.path.islink(directory):
            os.symlink(os.readlink(directory), place)
        else:
            os.makedirs(place)
            _bind(directory, place)
    for file in filter(os.path.exists, SYSTEM_FILES):
        os.makedirs(os.path.dirname(root + file), exist_ok=True)
        _write(root + file, "")
        _bind(file, root + file)
    for file in _mapped_files():
        os.stat(root + file)  # a Python whose libraries are elsewhere would not start


def _mapped_files() -> set[str]:
    """The interpreter and the libraries that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.rstrip("\n")[line.index("/") :] for line in maps if "/" in line}
    return set(filter(os.path.isfile, paths))


def _bind(source: str, place: str) -> None:
    _mount(source, place, None, _MS_BIND | _MS_REC)
    locked = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_LOCKED if os.path.isdir(source) else 0)
    _require(
        _libc.syscall(
            _SYS_MOUNT_SETATTR,
            _AT_FDCWD,
            os.fsencode(place),
            _AT_RECURSIVE,
            ctypes.byref(locked),
            ctypes.sizeof(locked),
        )
    )


def _mount(source: str, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text if text is None else os.fsencode(text) for text in (source, place, kind, options)]
    _require(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def _fork_from_init() -> None:
    """Returns in a new child only. Its parent stays as the namespace's first process, whose end ends all others."""
    program = os.fork()
    if program == 0:
        return
    while True:
        ended, status = os.wait()
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _can_start_python(user: int) -> bool:
    """Whether this user may read the installation; root's may be in root's home."""
    os.seteuid(user)
    readable = os.access(os.__file__, os.R_OK, effective_ids=True)
    runnable = os.access(sys.executable, os.X_OK, effective_ids=True)
    os.seteuid(0)
    return readable and runnable


def _become_user(user: int) -> None:
    os.chown(".", user, -1)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def _set_limits(job: dict[str, Any], *, count_processes: bool) -> None:
    limits = {
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: job["output_bytes"],
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if count_processes:
        limits[resource.RLIMIT_NPROC] = job["processes"]
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (value, value))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _require(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
