"""The kinds of isolation, from none to namespaces.

A kind is a class of `KINDS`: its constructor prepares, and raises if this machine forbids it; `enter` is called by the
keeper, and `become_program` by its child. Every kind but `none` installs the filter of system calls.
"""

import ctypes
import json
import os
import socket
import struct
import sys
import tempfile
from typing import NoReturn

from . import kernel, seccomp
from .program import (
    SYSTEM_FILES,
    Job,
    become_user,
    command,
    copy,
    die_with_keeper,
    expose_to_out_of_memory_killer,
    limit,
    mapped_files,
    open_to_all,
    own_user,
    visible_directories,
)

BUBBLEWRAP = ("/usr/bin/bwrap", "/bin/bwrap", "/usr/local/bin/bwrap")
NOBODY = 65534
PROGRAM, INSTALLATION, FILTER, STATUS = 3, 4, 5, 6
"""Descriptors at the start of a program, or of bubblewrap, which keeps all but the first two to itself."""
WRITABLE_NAMES = ("app", "logs", "solution", "tests", "tmp", "workspace")
"""Links in the root of `Namespaces` to directories of these names below the one that can be written: a program that
expects to write there, as it could in a container, makes the directory and can."""


class Unprotected:
    """No isolation: limits, a user of its own if root starts it, and a directory that is removed afterwards."""

    def __init__(self) -> None:
        self.proc = os.open("/proc", os.O_PATH)
        self.installation = os.open(sys.base_prefix, os.O_PATH)
        self.is_private = os.getuid() == 0 and not open_to_all(sys.executable)
        self.user = NOBODY
        self.scratch: tempfile.TemporaryDirectory[str] | None = None

    def enter(self, job: Job, program: int) -> None:
        self.user = own_user()
        self.scratch = tempfile.TemporaryDirectory(prefix="areal-program-", ignore_cleanup_errors=True)
        os.chdir(self.scratch.name)
        if os.getuid() == 0:
            os.chown(".", self.user, self.user)

    def leave(self) -> None:
        if self.scratch is not None:
            self.scratch.cleanup()

    def become_program(self, job: Job, keeper: socket.socket, program: int) -> None:
        copy(program, "main.py")
        expose_to_out_of_memory_killer(self.proc)
        limit(job, self._processes(job))
        become_user(self.user)
        die_with_keeper(keeper)
        self.start_python("main.py")

    def exit_status(self, status: int) -> int:
        return status

    def start_python(self, program: str) -> NoReturn:
        """Root's Python may be in root's home, which others reach only through a descriptor that root has opened."""
        python, environment = sys.executable, {}
        if self.is_private:
            os.dup2(self.installation, INSTALLATION)
            home = f"/proc/self/fd/{INSTALLATION}"
            python = os.path.join(home, os.path.relpath(python, sys.base_prefix))
            environment = {"LD_LIBRARY_PATH": f"{home}/lib"}
        os.execve(python, command(python, program), environment)

    def _processes(self, job: Job) -> int:
        """For RLIMIT_NPROC. A user who is not the program's alone has other processes, of which there are at most
        as many as the machine has."""
        if os.getuid() == 0:
            return job.processes
        with open(os.open("loadavg", os.O_RDONLY, dir_fd=self.proc), encoding="ascii") as file:
            return job.processes + int(file.read().split()[3].split("/")[1])


class Landlock(Unprotected):
    """The kernel refuses every file but the Python installation's, and the filter everything else: one process, which
    may have threads, and nothing that it could write."""

    def __init__(self) -> None:
        super().__init__()
        seccomp.require_filter()
        self.version = kernel.libc.syscall(kernel.LANDLOCK_CREATE_RULESET, None, 0, 1)
        if self.version < 1:
            raise kernel.Refused(f"this kernel has no Landlock ({os.strerror(ctypes.get_errno())})")
        self.rules = self._make_rules()

    def _make_rules(self) -> int:
        everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(self.version, 16)) - 1
        network = 3 if self.version >= 4 else 0  # bind and connect of TCP
        scope = 3 if self.version >= 6 else 0  # abstract sockets and signals stay inside
        attributes = struct.pack("QQQ", everything, network, scope)
        rules = kernel.checked(
            "landlock", kernel.libc.syscall(kernel.LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
        )
        execute, write, read, list_, truncate = 1, 2, 4, 8, 1 << 14
        for path in (*visible_directories(), *filter(os.path.exists, SYSTEM_FILES)):
            allowed = execute | read | list_ if os.path.isdir(path) else read
            if path == "/dev/null":
                allowed |= (write | truncate) & everything
            place = os.open(path, os.O_PATH)
            rule = struct.pack("=Qi", allowed, place)
            kernel.checked("landlock", kernel.libc.syscall(kernel.LANDLOCK_ADD_RULE, rules, 1, rule, 0))
            os.close(place)
        os.set_inheritable(rules, False)
        return rules

    def enter(self, job: Job, program: int) -> None:
        self.user = own_user()
        os.chdir("/")

    def become_program(self, job: Job, keeper: socket.socket, program: int) -> None:
        os.dup2(program, PROGRAM)
        expose_to_out_of_memory_killer(self.proc)
        limit(job, self._processes(job))
        become_user(self.user)
        die_with_keeper(keeper)
        kernel.checked("landlock", kernel.libc.syscall(kernel.LANDLOCK_RESTRICT_SELF, self.rules, 0))
        seccomp.install(seccomp.system_call_filter(only_process=os.getpid(), refuse_truncation=self.version < 3))
        self.start_python(f"/proc/self/fd/{PROGRAM}")


class Bubblewrap(Unprotected):
    """Namespaces made by bubblewrap, which some distributions permit where they forbid them to everyone else. One
    process, which may have threads, and nothing that it could write."""

    def __init__(self) -> None:
        super().__init__()
        seccomp.require_filter()
        self.bubblewrap = next(filter(os.path.exists, BUBBLEWRAP), None)
        if self.bubblewrap is None:
            raise kernel.Refused("bwrap is not installed")
        if self.is_private:
            raise kernel.Refused(f"{sys.executable} cannot be read by other users than root")

    def enter(self, job: Job, program: int) -> None:
        self.user = own_user()
        self.status = os.pipe()
        os.chdir("/")

    def become_program(self, job: Job, keeper: socket.socket, program: int) -> None:
        assert self.bubblewrap is not None
        rules = os.memfd_create("filter")
        os.write(rules, seccomp.system_call_filter(one_process=True))
        os.lseek(rules, 0, os.SEEK_SET)
        for source, place in ((program, PROGRAM), (rules, FILTER), (self.status[1], STATUS)):
            os.dup2(source, place)
        expose_to_out_of_memory_killer(self.proc)
        limit(job, self._processes(job), max(job.output_bytes, os.fstat(program).st_size))  # it copies the text
        become_user(self.user, for_good=False)
        die_with_keeper(keeper)
        arguments = ["--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        arguments += ["--cap-drop", "ALL", "--die-with-parent", "--new-session"]
        for path in visible_directories():
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            else:
                arguments += ["--ro-bind", path, path]
        for path in filter(os.path.exists, SYSTEM_FILES):
            arguments += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
        arguments += ["--file", str(PROGRAM), "/scratch/main.py", "--remount-ro", "/", "--chdir", "/scratch"]
        arguments += ["--seccomp", str(FILTER), "--json-status-fd", str(STATUS)]
        os.execve(self.bubblewrap, [self.bubblewrap, *arguments, "--", *command(sys.executable, "main.py")], {})

    def exit_status(self, status: int) -> int:
        """Bubblewrap's own status is 1 also when it fails; what it tells of the program comes after its end."""
        os.close(self.status[1])
        with open(self.status[0], encoding="utf-8") as file:
            told = [json.loads(line) for line in file]
        if not any("exit-code" in each for each in told):
            raise kernel.Refused("bubblewrap could not start the program")
        return status


class Namespaces(Unprotected):
    """Namespaces of its own: no network, no other process, no shared memory, and a file system that holds the Python
    installation, read-only, and one empty directory in memory."""

    def __init__(self) -> None:
        super().__init__()
        seccomp.require_filter()
        self.privileged = os.getuid() == 0 and kernel.libc.unshare(kernel.NEW_MOUNTS | kernel.NEW_REST) == 0
        if not self.privileged:
            become_user(own_user(), for_good=False)
            self._enter_user_namespace(kernel.NEW_MOUNTS | kernel.NEW_REST)
        self._build_root()

    def _enter_user_namespace(self, others: int) -> None:
        user, group = os.getuid(), os.getgid()
        kernel.checked("unshare", kernel.libc.unshare(kernel.NEW_USER | others))
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(os.open(f"self/{name}", os.O_WRONLY, dir_fd=self.proc), "w", encoding="ascii") as file:
                file.write(text)

    def _build_root(self) -> None:
        """Make a file system with only what Python needs the root of this process and its children."""
        paths = [*visible_directories(), *filter(os.path.exists, SYSTEM_FILES)]
        shown = [(path, os.open(path, os.O_PATH)) for path in paths]  # some may be below the place of the new root
        root = "/tmp"
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
        os.mkdir(f"{root}/scratch")
        for path, source in shown:
            place = root + path
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if os.path.islink(path):
                os.symlink(os.readlink(path), place)
                continue
            if os.path.isdir(path):
                os.makedirs(place, exist_ok=True)
            else:
                os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
            kernel.mount(f"/proc/self/fd/{source}", place, None, kernel.MS_BIND | kernel.MS_REC)
            kernel.restrict_mount(
                place,
                kernel.ATTR_NOSUID | (kernel.ATTR_RDONLY | kernel.ATTR_NODEV if os.path.isdir(path) else 0),
                below=True,
            )
        for name in WRITABLE_NAMES:
            if not os.path.lexists(f"{root}/{name}"):  # Python may be installed there
                os.symlink(f"scratch/{name}", f"{root}/{name}")
        mapped = mapped_files()
        os.chdir(root)
        kernel.pivot_root()
        kernel.restrict_mount("/", kernel.ATTR_RDONLY)
        for path in mapped:
            os.stat(path)  # a Python whose libraries are elsewhere would not start

    def enter(self, job: Job, program: int) -> None:
        if self.privileged:
            self.user = own_user()
            kernel.checked("unshare", kernel.libc.unshare(kernel.NEW_PROCESSES | kernel.NEW_MOUNTS | kernel.NEW_REST))
        else:
            self._enter_user_namespace(kernel.NEW_PROCESSES | kernel.NEW_MOUNTS | kernel.NEW_REST)
        size = job.disk_bytes + os.fstat(program).st_size
        options = f"size={size},nr_inodes=4096,mode=700,uid={self.user},gid={self.user}"
        kernel.mount("tmpfs", "/scratch", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        os.chdir("/scratch")

    def become_program(self, job: Job, keeper: socket.socket, program: int) -> None:
        die_with_keeper(keeper)
        copy(program, "main.py")
        expose_to_out_of_memory_killer(self.proc)
        child = os.fork()
        if child != 0:
            keeper.close()
            _be_init(child)
        limit(job, job.processes)
        become_user(self.user)
        seccomp.install(seccomp.system_call_filter())
        os.execve(sys.executable, command(sys.executable, "main.py"), {})


def _be_init(child: int) -> NoReturn:
    """Stay as the namespace's first process, whose end ends all others."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


KINDS: dict[str, type[Unprotected]] = {
    "namespaces": Namespaces,
    "bubblewrap": Bubblewrap,
    "landlock": Landlock,
    "none": Unprotected,
}
