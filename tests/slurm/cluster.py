"""Hosts in namespaces of this machine, and a real Slurm over them. Needs root, iproute2, munge and Slurm's programs.

Each host has a network, a host name, shared memory and /tmp of its own, so that nothing can reach another host by
loopback, by a Unix socket or by shared memory. The other files of the machine are the same everywhere. The test itself
runs on the "login node", which every host reaches by `LOGIN`.
"""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

NETWORK = "10.77.0"
LOGIN = f"{NETWORK}.254"
BRIDGE = "arealbr0"
CONTROL_PORT, NODE_PORT = 27817, 27818
READY_SECONDS = 30.0


class Hosts:
    """`count` hosts named h1, h2, …"""

    def __init__(self, count: int) -> None:
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        self.down()  # what an earlier test run left
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{LOGIN}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(self.names, 1):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", f"v{name}", "master", BRIDGE)
            _run("ip", "link", "set", f"v{name}", "up")
            inside = ["ip", "-n", name]
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            _run(*inside, "route", "add", "default", "via", LOGIN)
            self._holders[name] = _hold(name)

    def down(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait(5)
        self._holders.clear()
        for name in self.names:
            _run("ip", "netns", "del", name, check=False)
            _run("ip", "link", "del", f"v{name}", check=False)
        _run("ip", "link", "del", BRIDGE, check=False)

    def inside(self, name: str, *argv: str) -> list[str]:
        """A command line that runs `argv` on that host."""
        # By the holder's process and not by `ip netns exec`, which would hide the control groups.
        return ["nsenter", "-t", str(self._holders[name].pid), "-n", "-u", "-m", *argv]

    def pull_cable(self, name: str) -> None:
        _run("ip", "link", "set", f"v{name}", "down")

    def plug_cable(self, name: str) -> None:
        _run("ip", "link", "set", f"v{name}", "up")

    def processes(self, name: str) -> set[int]:
        """Every process on that host but its holder."""
        holder = self._holders[name].pid
        network = os.readlink(f"/proc/{holder}/ns/net")
        found = set()
        for entry in os.listdir("/proc"):
            with suppress(OSError, ValueError):
                if int(entry) != holder and os.readlink(f"/proc/{entry}/ns/net") == network:
                    found.add(int(entry))
        return found


class SlurmCluster:
    """slurmctld on the login node, one slurmd on each host; its files are in `directory`."""

    def __init__(self, directory: Path, hosts: Hosts) -> None:
        self.config = directory / "slurm.conf"
        self._directory = directory
        self._hosts = hosts

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.config)}

    def up(self) -> None:
        munge = self._directory / "munge"
        for each in ("state", "spool", "log", "munge"):
            (self._directory / each).mkdir(parents=True, mode=0o755)
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = [f"--{kind}-file={munge}/{kind}" for kind in ("key", "pid", "log", "seed")]
        _run("munged", "--force", f"--socket={munge}/socket", "--num-threads=2", *files)
        self.config.write_text(self._settings())
        _run("slurmctld", "-f", str(self.config))
        for name in self._hosts.names:
            _run(*self._hosts.inside(name, "slurmd", "-f", str(self.config), "-N", name), env=self.env)
        until(lambda: self._idle() == len(self._hosts.names), READY_SECONDS, "idle nodes")

    def down(self) -> None:
        for path in [
            *self._directory.glob("slurmd.*.pid"),
            self._directory / "slurmctld.pid",
            self._directory / "munge/pid",
        ]:
            with suppress(FileNotFoundError, ValueError, ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        for name in self._hosts.names:  # what a failed test left on a node
            for pid in self._hosts.processes(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def run(self, *argv: str, check: bool = True) -> str:
        """What a Slurm command prints."""
        return _run(*argv, env=self.env, check=check)

    def _idle(self) -> int:
        return int(self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() or 0)

    def _settings(self) -> str:
        d = self._directory
        lines = {
            "ClusterName": "areal",
            "SlurmctldHost": f"{os.uname().nodename.split('.')[0]}({LOGIN})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "SlurmctldPort": CONTROL_PORT,
            "SlurmdPort": NODE_PORT,
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={d}/munge/socket",
            "CredType": "cred/munge",
            "StateSaveLocation": d / "state",
            "SlurmdSpoolDir": d / "spool/%n",
            "SlurmctldPidFile": d / "slurmctld.pid",
            "SlurmdPidFile": d / "slurmd.%n.pid",
            "SlurmctldLogFile": d / "log/slurmctld.log",
            "SlurmdLogFile": d / "log/slurmd.%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "MpiDefault": "none",
            "SwitchType": "switch/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU_Memory",
            "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,bf_interval=1",
            "ReturnToService": 2,
            "SlurmdParameters": "config_overrides",  # the hosts together have more cores than the machine
            "SlurmdTimeout": 10,
            "KillWait": 2,
            "MailProg": "/bin/true",
        }
        nodes = [
            f"NodeName={name} NodeHostname={name} NodeAddr={NETWORK}.{number} CPUs=4 RealMemory=8000 State=UNKNOWN"
            for number, name in enumerate(self._hosts.names, 1)
        ]
        partition = f"PartitionName=debug Nodes={','.join(self._hosts.names)} Default=YES MaxTime=INFINITE State=UP"
        return "\n".join([*(f"{name}={value}" for name, value in lines.items()), *nodes, partition, ""])


def missing_programs() -> list[str]:
    return [name for name in ("slurmctld", "slurmd", "munged", "ip", "nsenter") if shutil.which(name) is None]


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition that nothing announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


def _hold(name: str) -> "subprocess.Popen[bytes]":
    """A process that keeps the namespaces of a host."""
    private = "mount -t tmpfs -o size=4g tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp"
    setup = f"hostname {name} && {private} && echo ready && exec sleep infinity"
    command = ["nsenter", f"--net=/var/run/netns/{name}", "unshare", "--uts", "--mount", "--propagation", "private"]
    holder = subprocess.Popen([*command, "bash", "-c", setup], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n", f"host {name} could not be made"
    return holder


def _run(*argv: str, env: dict[str, str] | None = None, check: bool = True) -> str:
    done = subprocess.run(argv, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done.stdout


__all__: Sequence[str] = ("LOGIN", "Hosts", "SlurmCluster", "missing_programs", "until")
