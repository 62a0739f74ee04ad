"""Calls of the Linux kernel that Python has no function for, and their numbers."""

import ctypes
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
NEW_USER, NEW_MOUNTS, NEW_PROCESSES = 0x10000000, 0x00020000, 0x20000000
NEW_REST = 0x04000000 | 0x08000000 | 0x40000000  # host name, IPC, network
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 1 << 12, 1 << 14, 1 << 18, 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_SETATTR, LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 442, 444, 445, 446


class Refused(Exception):
    """This kind of isolation does not work here."""


def mount(source: str, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text if text is None else os.fsencode(text) for text in (source, place, kind, options)]
    checked(f"mount {place}", libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def restrict_mount(place: str, attributes: int, *, below: bool = False) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = AT_RECURSIVE if below else 0
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(place), flags, wanted, len(wanted))
    checked(f"mount_setattr {place}", result)


def pivot_root() -> None:
    """Make the working directory the root, and leave nothing of the old one."""
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    checked("pivot_root", libc.syscall(number, b".", b"."))
    checked("umount", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def prctl(option: int, value: int) -> None:
    checked("prctl", libc.prctl(option, value, 0, 0, 0))


def checked(what: str, result: int) -> int:
    if result < 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
