"""Starts programs under one kind of isolation and reports how each ended.

It imports nothing of this package: it is run with `-I -S`, without environment variables, once per calling process and
kind. It prepares what programs can share, then waits for jobs. Its processes:

    launcher   one per caller; ends with it
      keeper   one per program: enforces the deadline, kills what is left, reports
        init   in a PID namespace only: its end ends every process of the program
          the program, as a user without rights

A kind of isolation is a class of `KINDS`: its constructor prepares, and raises if this machine forbids it; `enter` is
called by the keeper, and `become_program` by its child. Every kind but `none` installs the filter of system calls.
"""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
from typing import Any, NamedTuple, NoReturn

SYSTEM_DIRECTORIES = ("/usr", "/lib", "/lib64", "/bin", "/nix/store")
INSTALLATION_DIRECTORIES = ("bin", "lib", "lib64")
"""Of Python, which may be installed in someone's home."""
SYSTEM_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/urandom")
BUBBLEWRAP = ("/usr/bin/bwrap", "/bin/bwrap", "/usr/local/bin/bwrap")
NOBODY = 65534
START_SECONDS = 30.0
"""Until Python has started, on a machine that is busy; the program's own time begins then."""
PROGRAM, INSTALLATION, FILTER, STATUS = 3, 4, 5, 6
"""Descriptors at the start of a program, or of bubblewrap, which keeps all but the first two to itself."""

_libc = ctypes.CDLL(None, use_errno=True)


class Job(NamedTuple):
    timeout_seconds: float
    memory_bytes: int
    disk_bytes: int
    output_bytes: int
    processes: int
    open_files: int


class Refused(Exception):
    """This kind of isolation does not work here."""


# Processes


def main() -> None:
    setup = json.loads(sys.argv[1])
    while os.open("/dev/null", os.O_RDONLY) < STATUS:
        pass  # the numbers up to it are taken, so nothing that is still needed is at one of them later
    for which in (resource.RLIMIT_CPU, resource.RLIMIT_DATA):  # the caller's own, which it may have set for one call
        hard = resource.getrlimit(which)[1]
        resource.setrlimit(which, (hard, hard))
    control = socket.socket(fileno=os.dup(0))
    os.dup2(STATUS, 0)  # a keeper must not hold the control socket: the caller has to notice when this process ends
    caller = os.pidfd_open(setup["caller"])
    if os.getppid() != setup["caller"]:
        return  # it has already ended
    try:
        isolation = KINDS[setup["isolation"]]()
    except (OSError, Refused) as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    control.send(b"{}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no reaping
    while _first_ready(control.fileno(), caller) == control.fileno():
        # Jobs come with descriptors: the socket of the report, the program, its three streams.
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 5)
        if not message:
            return
        for each in descriptors:
            os.set_inheritable(each, False)  # a program that has the report's could forge it
        if os.fork() == 0:
            control.close()
            _keep(isolation, Job(**json.loads(message)), caller, *descriptors)
        for each in descriptors:
            os.close(each)


def _keep(isolation: "Unprotected", job: Job, caller: int, report: int, program: int, *streams: int) -> NoReturn:
    """Run one program to its end or its deadline; also end it when whoever asked for it has gone."""
    outcome: dict[str, Any] = {}
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        isolation.enter(job, program)
        outcome["status"] = _run(isolation, job, (report, caller), program, streams)
    except Exception as error:
        outcome["failure"] = f"{type(error).__name__}: {error}"
    finally:
        try:
            isolation.leave()
        finally:
            try:
                os.write(report, json.dumps(outcome).encode())
            finally:
                os._exit(0)


def _run(
    isolation: "Unprotected", job: Job, owners: tuple[int, ...], program: int, streams: tuple[int, ...]
) -> int | None:
    """Exit status; None = it was killed at the deadline. Raises if the program could not be started."""
    ours, theirs = socket.socketpair()  # tells of trouble until a successful exec closes it
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            os.setsid()  # a signal to its process group reaches no one else
            for number, each in enumerate(streams):
                os.dup2(each, number)
            isolation.become_program(job, theirs, program)
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)
    theirs.close()
    ours.settimeout(START_SECONDS)
    status: int | None = None
    try:
        trouble = ours.recv(4096).decode()
        if trouble:
            raise Refused(trouble)
        end = os.pidfd_open(child)
        if _first_ready(end, *owners, seconds=job.timeout_seconds) == end:
            status = isolation.exit_status(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        _end_all(isolation.proc)
    return status


def _end_all(proc: int) -> None:
    """Kill every child, and the children that theirs leave to us, until there is none."""
    while True:
        with open(os.open("thread-self/children", os.O_RDONLY, dir_fd=proc), encoding="ascii") as file:
            children = file.read().split()
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _first_ready(*descriptors: int, seconds: float | None = None) -> int | None:
    """The first of them that can be read or has ended; None = the time is over."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    ready = {each for each, _ in poll.poll(None if seconds is None else min(seconds * 1000, 2**31 - 1))}
    return next((each for each in descriptors if each in ready), None)


def _die_with_keeper(keeper: socket.socket) -> None:
    """To be called again after a change of user, which clears it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _first_ready(keeper.fileno(), seconds=0) is not None:
        os._exit(1)  # the keeper ended before this call


# Kinds of isolation


class Unprotected:
    """No isolation: limits, a user of its own if root starts it, and a directory that is removed afterwards."""

    def __init__(self) -> None:
        self.proc = os.open("/proc", os.O_PATH)
        self.installation = os.open(sys.base_prefix, os.O_PATH)
        self.is_private = os.getuid() == 0 and not _open_to_all(sys.executable)
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
        _copy(program, "main.py")
        _expose_to_out_of_memory_killer(self.proc)
        limit(job, self._processes(job))
        become_user(self.user)
        _die_with_keeper(keeper)
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
        require_filter()
        self.version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)
        if self.version < 1:
            raise Refused(f"this kernel has no Landlock ({os.strerror(ctypes.get_errno())})")
        self.rules = self._make_rules()

    def _make_rules(self) -> int:
        everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(self.version, 16)) - 1
        network = 3 if self.version >= 4 else 0  # bind and connect of TCP
        scope = 3 if self.version >= 6 else 0  # abstract sockets and signals stay inside
        attributes = struct.pack("QQQ", everything, network, scope)
        rules = _checked("landlock", _libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0))
        execute, write, read, list_, truncate = 1, 2, 4, 8, 1 << 14
        for path in (*visible_directories(), *filter(os.path.exists, SYSTEM_FILES)):
            allowed = execute | read | list_ if os.path.isdir(path) else read
            if path == "/dev/null":
                allowed |= (write | truncate) & everything
            place = os.open(path, os.O_PATH)
            rule = struct.pack("=Qi", allowed, place)
            _checked("landlock", _libc.syscall(_LANDLOCK_ADD_RULE, rules, 1, rule, 0))
            os.close(place)
        os.set_inheritable(rules, False)
        return rules

    def enter(self, job: Job, program: int) -> None:
        self.user = own_user()
        os.chdir("/")

    def become_program(self, job: Job, keeper: socket.socket, program: int) -> None:
        os.dup2(program, PROGRAM)
        _expose_to_out_of_memory_killer(self.proc)
        limit(job, self._processes(job))
        become_user(self.user)
        _die_with_keeper(keeper)
        _checked("landlock", _libc.syscall(_LANDLOCK_RESTRICT_SELF, self.rules, 0))
        install(system_call_filter(only_process=os.getpid(), refuse_truncation=self.version < 3))
        self.start_python(f"/proc/self/fd/{PROGRAM}")


class Bubblewrap(Unprotected):
    """Namespaces made by bubblewrap, which some distributions permit where they forbid them to everyone else. One
    process, which may have threads, and nothing that it could write."""

    def __init__(self) -> None:
        super().__init__()
        require_filter()
        self.bubblewrap = next(filter(os.path.exists, BUBBLEWRAP), None)
        if self.bubblewrap is None:
            raise Refused("bwrap is not installed")
        if self.is_private:
            raise Refused(f"{sys.executable} cannot be read by other users than root")

    def enter(self, job: Job, program: int) -> None:
        self.user = own_user()
        self.status = os.pipe()
        os.chdir("/")

    def become_program(self, job: Job, keeper: socket.socket, program: int) -> None:
        assert self.bubblewrap is not None
        rules = os.memfd_create("filter")
        os.write(rules, system_call_filter(one_process=True))
        os.lseek(rules, 0, os.SEEK_SET)
        for source, place in ((program, PROGRAM), (rules, FILTER), (self.status[1], STATUS)):
            os.dup2(source, place)
        _expose_to_out_of_memory_killer(self.proc)
        limit(job, self._processes(job), max(job.output_bytes, os.fstat(program).st_size))  # it copies the text
        become_user(self.user, for_good=False)
        _die_with_keeper(keeper)
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
            raise Refused("bubblewrap could not start the program")
        return status


class Namespaces(Unprotected):
    """Namespaces of its own: no network, no other process, no shared memory, and a file system that holds the Python
    installation, read-only, and one empty directory in memory."""

    def __init__(self) -> None:
        super().__init__()
        require_filter()
        self.privileged = os.getuid() == 0 and _libc.unshare(_NEW_MOUNTS | _NEW_REST) == 0
        if not self.privileged:
            become_user(own_user(), for_good=False)
            self._enter_user_namespace(_NEW_MOUNTS | _NEW_REST)
        self._build_root()

    def _enter_user_namespace(self, others: int) -> None:
        user, group = os.getuid(), os.getgid()
        _checked("unshare", _libc.unshare(_NEW_USER | others))
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
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
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
            _mount(f"/proc/self/fd/{source}", place, None, _MS_BIND | _MS_REC)
            _restrict_mount(
                place, _ATTR_NOSUID | (_ATTR_RDONLY | _ATTR_NODEV if os.path.isdir(path) else 0), below=True
            )
        mapped = _mapped_files()
        os.chdir(root)
        _pivot_root()
        _restrict_mount("/", _ATTR_RDONLY)
        for path in mapped:
            os.stat(path)  # a Python whose libraries are elsewhere would not start

    def enter(self, job: Job, program: int) -> None:
        if self.privileged:
            self.user = own_user()
            _checked("unshare", _libc.unshare(_NEW_PROCESSES | _NEW_MOUNTS | _NEW_REST))
        else:
            self._enter_user_namespace(_NEW_PROCESSES | _NEW_MOUNTS | _NEW_REST)
        size = job.disk_bytes + os.fstat(program).st_size
        options = f"size={size},nr_inodes=4096,mode=700,uid={self.user},gid={self.user}"
        _mount("tmpfs", "/scratch", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
        os.chdir("/scratch")

    def become_program(self, job: Job, keeper: socket.socket, program: int) -> None:
        _die_with_keeper(keeper)
        _copy(program, "main.py")
        _expose_to_out_of_memory_killer(self.proc)
        child = os.fork()
        if child != 0:
            keeper.close()
            _be_init(child)
        limit(job, job.processes)
        become_user(self.user)
        install(system_call_filter())
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


# What every kind needs


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
    raise Refused("root may not become another user here, and programs never run as root")


def become_user(user: int, *, for_good: bool = True) -> None:
    """Lose every right. Raises rather than go on as root. `for_good=False` lets a program that is started have more
    rights than this process, as bubblewrap does in some distributions; it takes them from its own program."""
    for capability in range(64 if for_good else 0):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last one, or not ours to drop: then no_new_privs has to do
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if 0 in (*os.getresuid(), *os.getresgid()):
        raise Refused("programs never run as root, and this process could not become another user")
    _checked("capset", _libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    if for_good:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)


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


def _expose_to_out_of_memory_killer(proc: int) -> None:
    """If the machine runs out of memory, the program goes first."""
    with open(os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc), "w", encoding="ascii") as file:
        file.write("1000")


def _copy(source: int, path: str) -> None:
    with open(path, "wb") as file:
        file.write(os.pread(source, os.fstat(source).st_size, 0))
    os.chmod(path, 0o644)


def _open_to_all(path: str) -> bool:
    """Whether every user may go through the directories above it."""
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 1:
            return False
    return True


def _mapped_files() -> list[str]:
    """The interpreter and the libraries that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.rstrip("\n")[line.index("/") :] for line in maps if "/" in line}
    return list(filter(os.path.isfile, paths))


# The filter of system calls

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column in the tables below, and the kernel's name of the architecture."""
_FIRST_UNKNOWN = 451
"""Newer system calls are in no table, so the filter says that the kernel has none of them."""

# Name and numbers on x86_64 and aarch64; - = it does not have it.

_REFUSED = """
    socket 41 198  connect 42 203  bind 49 200  listen 50 201
    unshare 272 97  setns 308 268  mount 165 40  umount2 166 39  pivot_root 155 41  chroot 161 51  open_tree 428 428
    move_mount 429 429  fsopen 430 430  fsconfig 431 431  fsmount 432 432  fspick 433 433  mount_setattr 442 442
    name_to_handle_at 303 264  open_by_handle_at 304 265
    ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  process_madvise 440 440
    process_mrelease 448 448  pidfd_getfd 438 438  kcmp 312 272  migrate_pages 256 238  move_pages 279 239
    memfd_create 319 279  memfd_secret 447 447  shmget 29 194  shmctl 31 195  shmat 30 196  msgget 68 186  msgctl 71 187
    msgsnd 69 189  msgrcv 70 188  semget 64 190  semctl 66 191  semop 65 193  semtimedop 220 192  mq_open 240 180
    mq_unlink 241 181  add_key 248 217  request_key 249 218  keyctl 250 219
    io_uring_setup 425 425  io_uring_enter 426 426  io_uring_register 427 427  bpf 321 280  perf_event_open 298 241
    userfaultfd 323 282  personality 135 92  modify_ldt 154 -  syslog 103 116  quotactl 179 60  quotactl_fd 443 443
    sync 162 81  syncfs 306 267
"""
"""Everywhere: the network; other namespaces and roots; other processes; memory that belongs to no process or outlives
it; ways around this filter, and parts of the kernel that such a program does not need."""
_REFUSED_TO_ONE_PROCESS = "fork 57 -  vfork 58 -"
_REFUSED_BESIDE_OTHERS = """
    chmod 90 -  fchmod 91 52  fchmodat 268 53  chown 92 -  lchown 94 -  fchown 93 55  fchownat 260 54
    utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88  truncate 76 45
    setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7  removexattr 197 14  lremovexattr 198 15  fremovexattr 199 16
    inotify_init 253 -  inotify_init1 294 26  inotify_add_watch 254 27  fanotify_init 300 262  fanotify_mark 301 263
    tkill 200 130  pidfd_open 434 434  pidfd_send_signal 424 424  setpriority 141 140  ioprio_set 251 30
    sched_setscheduler 144 119  sched_setparam 142 118  sched_setattr 314 274
"""
"""Where it could see files and processes of others: what Landlock leaves open of these."""
_CHECKED = """
    clone 56 220  clone3 435 435  prctl 157 167  socketpair 53 199  prlimit64 302 261  fcntl 72 25  ioctl 16 29
    kill 62 129  tgkill 234 131  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240  sched_setaffinity 203 122
    open 2 -  openat 257 56  openat2 437 437  creat 85 -
"""
"""Allowed or refused by their arguments."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_THREAD = 0x00010000
_ALL_NAMESPACES = 0x7E020080


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One step of the filter; the jumps count steps to skip."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def _argument_is_one_of(position: int, *values: int) -> bytes:
    """Refuse every other value. All arguments that are checked here are of 32 bits."""
    steps = _instruction(_LOAD, _ARGUMENTS + 8 * position)
    for left, value in zip(range(len(values), 0, -1), values, strict=True):
        steps += _instruction(_EQUAL, value, if_true=left)
    return steps + _instruction(_RETURN, _REFUSE)


def _argument_is_none_of(position: int, *values: int) -> bytes:
    steps = _instruction(_LOAD, _ARGUMENTS + 8 * position)
    for value in values:
        steps += _instruction(_EQUAL, value, if_false=1) + _instruction(_RETURN, _REFUSE)
    return steps


def _argument_has(position: int, bits: int) -> bytes:
    steps = _instruction(_LOAD, _ARGUMENTS + 8 * position) + _instruction(_ANY_BIT, bits, if_true=1)
    return steps + _instruction(_RETURN, _REFUSE)


def _argument_lacks(position: int, bits: int) -> bytes:
    steps = _instruction(_LOAD, _ARGUMENTS + 8 * position) + _instruction(_ANY_BIT, bits, if_false=1)
    return steps + _instruction(_RETURN, _REFUSE)


def system_call_filter(
    *, only_process: int | None = None, one_process: bool = False, refuse_truncation: bool = False
) -> bytes:
    """A seccomp program. `only_process` is the one process that it may signal, where it could see others; it then may
    not start any either, as with `one_process`."""
    column, architecture = _MACHINES[os.uname().machine]
    one_process = one_process or only_process is not None
    steps = _instruction(_LOAD, _ARCHITECTURE) + _instruction(_EQUAL, architecture, if_true=1)
    steps += _instruction(_RETURN, _KILL) + _instruction(_LOAD, _NUMBER)
    steps += _instruction(_AT_LEAST, _FIRST_UNKNOWN, if_false=1) + _instruction(_RETURN, _UNKNOWN)
    refused = _numbers(_REFUSED, column)
    if one_process:
        refused |= _numbers(_REFUSED_TO_ONE_PROCESS, column)
    if only_process is not None:
        refused |= _numbers(_REFUSED_BESIDE_OTHERS, column)
    for number in refused.values():
        steps += _instruction(_EQUAL, number, if_false=1) + _instruction(_RETURN, _REFUSE)

    itself = (0,) if only_process is None else (0, only_process)
    checks = {
        "clone": _argument_has(0, _THREAD) if one_process else _argument_lacks(0, _ALL_NAMESPACES),
        "clone3": _instruction(_RETURN, _UNKNOWN),  # its flags are in memory; the C library then uses clone
        "socketpair": _argument_is_one_of(0, 1) + _argument_lacks(1, 0xE),  # of streams, which have no other address
        "prctl": _argument_is_none_of(0, _PR_SET_PDEATHSIG),
        "prlimit64": _argument_is_one_of(0, *itself),
        "fcntl": _argument_is_none_of(1, 8, 10, 15),  # F_SETOWN, F_SETSIG, F_SETOWN_EX send signals
        "ioctl": _argument_is_none_of(1, 0x8901, 0x8902, 0x5412, 0x541C),  # so do FIOSETOWN, SIOCSPGRP; terminals
    }
    if only_process is not None:
        for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "sched_setaffinity"):
            checks[name] = _argument_is_one_of(0, *itself)
    if refuse_truncation:
        checks |= {
            "open": _argument_lacks(1, os.O_TRUNC),
            "openat": _argument_lacks(2, os.O_TRUNC),
            "openat2": _instruction(_RETURN, _UNKNOWN),
            "creat": _instruction(_RETURN, _REFUSE),
        }
    numbers = _numbers(_CHECKED, column)
    for name, check in checks.items():
        if name in numbers:
            check += _instruction(_RETURN, _ALLOW)
            steps += _instruction(_EQUAL, numbers[name], if_false=len(check) // 8) + check
    return steps + _instruction(_RETURN, _ALLOW)


def _numbers(table: str, column: int) -> dict[str, int]:
    words = table.split()
    return {name: int(number) for name, number in zip(words[::3], words[1 + column :: 3], strict=True) if number != "-"}


def require_filter() -> None:
    if os.uname().machine not in _MACHINES:
        raise Refused(f"no filter of system calls for {os.uname().machine}, only for {' and '.join(_MACHINES)}")


def install(steps: bytes) -> None:
    """Holds for this process and all that it starts; needs no_new_privs."""
    program = struct.pack("HxxxxxxP", len(steps) // 8, _address(steps))
    _checked("seccomp", _libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0))


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


# The kernel

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_NEW_USER, _NEW_MOUNTS, _NEW_PROCESSES = 0x10000000, 0x00020000, 0x20000000
_NEW_REST = 0x04000000 | 0x08000000 | 0x40000000  # host name, IPC, network
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 1 << 12, 1 << 14, 1 << 18, 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_SETATTR, _LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 442, 444, 445, 446


def _mount(source: str, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text if text is None else os.fsencode(text) for text in (source, place, kind, options)]
    _checked(f"mount {place}", _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def _restrict_mount(place: str, attributes: int, *, below: bool = False) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if below else 0
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(place), flags, wanted, len(wanted))
    _checked(f"mount_setattr {place}", result)


def _pivot_root() -> None:
    """Make the working directory the root, and leave nothing of the old one."""
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    _checked("pivot_root", _libc.syscall(number, b".", b"."))
    _checked("umount", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def _prctl(option: int, value: int) -> None:
    _checked("prctl", _libc.prctl(option, value, 0, 0, 0))


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    main()
