"""The launcher and its keepers: take jobs, run each program to its end or its deadline, report."""

import json
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

from . import kernel
from .isolation import KINDS, STATUS, Unprotected
from .program import Job, first_ready

START_SECONDS = 30.0
"""Until Python has started, on a machine that is busy; the program's own time begins then."""


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
    except (OSError, kernel.Refused) as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    control.send(b"{}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no reaping
    while first_ready(control.fileno(), caller) == control.fileno():
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


def _keep(isolation: Unprotected, job: Job, caller: int, report: int, program: int, *streams: int) -> NoReturn:
    """Run one program to its end or its deadline; also end it when whoever asked for it has gone."""
    outcome: dict[str, Any] = {}
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
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
    isolation: Unprotected, job: Job, owners: tuple[int, ...], program: int, streams: tuple[int, ...]
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
            raise kernel.Refused(trouble)
        end = os.pidfd_open(child)
        if first_ready(end, *owners, seconds=job.timeout_seconds) == end:
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
