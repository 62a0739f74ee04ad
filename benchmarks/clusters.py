"""Hosts in namespaces of this machine, and a real Slurm or Ray over them, for tests and benchmarks.

Each host has a network, a host name, shared memory and /tmp of its own, so that nothing can reach another host by
loopback, by a Unix socket or by shared memory. The other files of the machine are the same everywhere. The machine
itself is the "login node", which every host reaches by `LOGIN`. Needs root and iproute2, Slurm also munge and its own
programs.
"""

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

NETWORK = "10.77.0"
LOGIN = f"{NETWORK}.254"
BRIDGE = "arealbr0"
CONTROL_PORT, NODE_PORT = 27817, 27818
READY_SECONDS = 30.0
RAY_PORT = 27819
RAY_READY_SECONDS = 100.0
LOCK = Path("/run/areal-hosts.lock")
"""Held while hosts are up: a machine has them once."""
HOST_PROGRAMS = ("ip", "nsenter", "unshare")
SLURM_PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "setpriv")


class Hosts:
    """`count` hosts named h1, h2, …"""

    def __init__(self, count: int) -> None:
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._lock: IO[bytes] | None = None

    def up(self) -> None:
        """Raises RuntimeError if this machine cannot have them."""
        if (why := why_no_hosts()) is not None:
            raise RuntimeError(why)
        self._lock = LOCK.open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise RuntimeError("other tests on this machine use its hosts; wait for their end") from None
        self._remove()  # what tests that were killed have left
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
        """Whatever still runs on a host is killed."""
        for name in self._holders:
            self.kill_all(name)
        for holder in self._holders.values():
            holder.kill()
            holder.wait(5)
        self._holders.clear()
        self._remove()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _remove(self) -> None:
        for name in self.names:
            for pid in _run("ip", "netns", "pids", name, check=False).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "del", name, check=False)
            _run("ip", "link", "del", f"v{name}", check=False)
        _run("ip", "link", "del", BRIDGE, check=False)

    def inside(self, name: str, *argv: str) -> list[str]:
        """A command line that runs `argv` on that host."""
        # By the holder's process and not by `ip netns exec`, which would hide the control groups.
        return ["nsenter", "-t", str(self._holders[name].pid), "-n", "-u", "-m", *argv]

    def path(self, name: str, path: str) -> Path:
        """The way to a path of that host, of its own /tmp for one."""
        return Path(f"/proc/{self._holders[name].pid}/root{path}")

    def address(self, name: str) -> str:
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def kill_all(self, name: str) -> None:
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

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

    def of_runs(self) -> set[int]:
        """Keepers on any host, and the commands that they run."""
        words = ("areal/infra/scheduler/keeper.py", "-m areal.")
        everywhere = {pid for name in self.names for pid in self.processes(name)}
        return {pid for pid in everywhere if any(word in command_line(pid) for word in words)}


class SlurmCluster:
    """slurmctld on the login node, one slurmd on each host; its files are in `directory`."""

    def __init__(self, directory: Path, hosts: Hosts) -> None:
        self.config = directory / "slurm.conf"
        self._directory = directory
        self._hosts = hosts
        self._daemons: list[subprocess.Popen[bytes]] = []

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
        self._start("munged", "--foreground", "--force", f"--socket={munge}/socket", "--num-threads=2", *files)
        until((munge / "socket").exists, READY_SECONDS, "socket of munged")
        self.config.write_text(self._settings())
        self._start("slurmctld", "-D", "-f", str(self.config))
        for name in self._hosts.names:
            self._start(*self._hosts.inside(name, "slurmd", "-D", "-f", str(self.config), "-N", name))
        until(lambda: self._idle() == len(self._hosts.names), READY_SECONDS, "idle nodes")

    def down(self) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(10)
        self._daemons.clear()
        for name in self._hosts.names:  # what a failed test left on a node
            self._hosts.kill_all(name)

    def _start(self, *argv: str) -> None:
        """A daemon that ends with this process, also if that is killed: the next cluster needs its port."""
        log = self._directory / "log" / "daemons.log"
        with log.open("ab") as file:
            self._daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *argv],
                    env={**os.environ, **self.env},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )

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


class RayCluster:
    """A node of Ray on each host, the head on the first; drivers run on a host too."""

    def __init__(self, hosts: Hosts, cpus: int) -> None:
        """`cpus`: what each node says it has."""
        self._hosts = hosts
        self._cpus = cpus

    @property
    def head(self) -> str:
        """The host that has it."""
        return self._hosts.names[0]

    @property
    def address(self) -> str:
        return f"{self._hosts.address(self.head)}:{RAY_PORT}"

    def up(self) -> None:
        for name in self._hosts.names:
            self.start(name)

    def start(self, name: str) -> None:
        """A node on that host, in place of whatever runs there."""
        self._hosts.kill_all(name)
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        ray += [f"--node-ip-address={self._hosts.address(name)}", f"--num-cpus={self._cpus}"]
        ray += [f"--object-store-memory={100 << 20}"]
        if name == self.head:
            ray += ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        else:
            ray += [f"--address={self.address}"]
        _run(*self._hosts.inside(name, *ray), env=self.env, seconds=RAY_READY_SECONDS)

    def down(self) -> None:
        for name in self._hosts.names:
            self._hosts.kill_all(name)

    @property
    def env(self) -> dict[str, str]:
        """Ray's monitor of memory would look at the whole machine, and what Ray starts would come after all else on it
        (niceness 15): the machine is not the cluster's alone."""
        return {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}


def why_no_hosts() -> str | None:
    """Why this machine cannot have hosts in namespaces; None = it can."""
    if os.getuid() != 0:
        return "hosts in namespaces need root"
    if missing := missing_programs(HOST_PROGRAMS):
        return f"hosts in namespaces need the programs {', '.join(missing)}"
    refused = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    return f"no namespaces here: {refused.stderr.strip()}" if refused.returncode else None


def missing_programs(names: tuple[str, ...] = SLURM_PROGRAMS) -> list[str]:
    return [name for name in names if shutil.which(name) is None]


def command_line(pid: int) -> str:
    """Empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition that nothing announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


def _hold(name: str) -> "subprocess.Popen[bytes]":
    """A process that keeps the namespaces of a host."""
    private = "mount -t tmpfs -o size=4g tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp"
    # Libraries ask for names of addresses, and name servers that cannot be reached take 10 s to do without.
    nameless = "echo nameserver 127.0.0.1 > /tmp/resolv.conf && mount --bind /tmp/resolv.conf /etc/resolv.conf"
    setup = f"hostname {name} && {private} && {nameless} && echo ready && exec sleep infinity"
    command = ["nsenter", f"--net=/var/run/netns/{name}", "unshare", "--uts", "--mount", "--propagation", "private"]
    holder = subprocess.Popen([*command, "bash", "-c", setup], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n", f"host {name} could not be made"
    return holder


def _run(*argv: str, env: dict[str, str] | None = None, check: bool = True, seconds: float = 60.0) -> str:
    done = subprocess.run(argv, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=seconds)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done.stdout
