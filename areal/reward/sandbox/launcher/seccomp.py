"""The filter of system calls, which the kernel runs before each call of a program."""

import ctypes
import os
import struct

from . import kernel

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
        "prctl": _argument_is_none_of(0, kernel.PR_SET_PDEATHSIG),
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
        raise kernel.Refused(f"no filter of system calls for {os.uname().machine}, only for {' and '.join(_MACHINES)}")


def install(steps: bytes) -> None:
    """Holds for this process and all that it starts; needs no_new_privs."""
    program = struct.pack("HxxxxxxP", len(steps) // 8, _address(steps))
    kernel.checked("seccomp", kernel.libc.prctl(kernel.PR_SET_SECCOMP, 2, program, 0, 0))


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
