"""Keepers as steps of one Slurm allocation: the one that the driver runs in, or one that is made for the run.

An allocation that is made here is held by a process that reads from the driver: when the driver ends, however that
comes about, Slurm takes the allocation back and ends its steps. A step whose resources are stated has them for itself
(`--exact`); one that states nothing shares what the allocation has on its node (`--overlap`).

Slurm places and watches. It carries neither messages nor logs, so nothing here depends on a shared file system.
"""

import asyncio
import itertools
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from areal.api.errors import PlacementRefused
from areal.infra.rpc.sockets import address_towards
from areal.infra.scheduler.base import Ask, KeeperStart, child_environment

JOB_VARIABLE = "SLURM_JOB_ID"
COMMAND_SECONDS = 30.0
"""How long Slurm's own commands may take to answer."""
END_SECONDS = 10.0
STDERR_SECONDS = 0.5
"""How long to wait for the rest of what `salloc` has to say."""
TAIL_CHARACTERS = 400


@dataclass(frozen=True)
class SlurmNode:
    """What an allocation has on one of its nodes, or what of it is still free."""

    name: str
    cpus: int
    gpus: int
    memory_mib: int | None
    """None = Slurm does not count memory."""

    def without(self, ask: Ask) -> "SlurmNode | None":
        """What is left if `ask` goes here; None = it does not fit."""
        memory = None if self.memory_mib is None else self.memory_mib - ask.memory_mib
        left = SlurmNode(self.name, self.cpus - ask.cpus, self.gpus - (ask.gpus or 0), memory)
        return left if min(left.cpus, left.gpus, memory or 0) >= 0 else None

    def __str__(self) -> str:
        memory = "" if self.memory_mib is None else f", {self.memory_mib} MiB"
        return f"{self.name}: {self.cpus} cpus, {self.gpus} gpus{memory}"


class SlurmLauncher:
    def __init__(self, nodes: int = 1, arguments: Sequence[str] = ()) -> None:
        """Of an allocation that is made here: on how many nodes, and further arguments of `salloc`."""
        self._count = nodes
        self._arguments = list(arguments)
        self._job = os.environ.get(JOB_VARIABLE, "")
        self._holder: asyncio.subprocess.Process | None = None
        """Holds an allocation that was made here; the end of its input gives it back."""
        self._free: list[SlurmNode] = []
        self._placed: dict[str, tuple[SlurmNode, Ask]] = {}
        self._numbers = itertools.count()
        self._host = ""

    @property
    def host(self) -> str:
        assert self._host, "reserve() comes first"
        return self._host

    async def reserve(self, asks: Sequence[Ask], timeout_seconds: float) -> None:
        if not self._job:
            await self._allocate(asks, timeout_seconds)
        nodes = await self._nodes()
        self._host = address_towards(await self._address_of(nodes[0].name))
        self._free = _without_driver(asks, nodes)
        others = [ask for ask in asks if not ask.with_driver]
        places, self._free = pack(others, self._free)
        self._placed |= {name: (node, ask) for (name, node), ask in zip(places, others, strict=True)}

    async def launch(self, ask: Ask, keeper: KeeperStart) -> "SlurmStep":
        if not self._free:
            await self.reserve([ask], COMMAND_SECONDS)
        if ask.name not in self._placed:
            places, self._free = pack([ask], self._free)
            self._placed[ask.name] = (places[0][1], ask)
        node, ask = self._placed[ask.name]
        name = f"areal-{next(self._numbers)}-{secrets.token_hex(4)}"
        argv = ["srun", f"--jobid={self._job}", f"--job-name={name}", *_step_options(node, ask), *keeper.argv]
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_step_environment(),
            start_new_session=True,  # a Ctrl-C is for the driver, which ends its steps in order
        )
        assert process.stdin is not None
        process.stdin.write(keeper.stdin)
        process.stdin.close()
        return SlurmStep(process, self._job, name, node.name)

    async def close(self) -> None:
        holder, self._holder = self._holder, None
        if holder is None:
            return
        assert holder.stdin is not None
        holder.stdin.close()
        try:
            await asyncio.wait_for(holder.wait(), END_SECONDS)
        except TimeoutError:
            await _slurm("scancel", self._job)
            holder.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(holder.wait(), END_SECONDS)

    async def _allocate(self, asks: Sequence[Ask], timeout_seconds: float) -> None:
        asks = [ask for ask in asks if not ask.with_driver]  # this host is none of Slurm's, or the run had a job
        argv = ["salloc", *allocation_options(asks, self._count), *self._arguments]
        argv += ["sh", "-c", f"echo ${JOB_VARIABLE}; exec cat"]
        try:
            self._holder = holder = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise PlacementRefused("scheduler.type=slurm needs Slurm's programs, and there is no salloc here") from None
        assert holder.stdout is not None
        try:
            line = await asyncio.wait_for(holder.stdout.readline(), timeout_seconds)
        except TimeoutError:
            line = b""
        if line:
            self._job = line.decode().strip()
            return
        why = await _why_refused(holder, timeout_seconds)
        self._holder = None
        asked = ", ".join(_said(ask) for ask in asks)
        raise PlacementRefused(
            f"Slurm gave no place for {asked} on {self._count} node(s): {why}; free are\n{await _free_nodes()}"
        )

    async def _nodes(self) -> list[SlurmNode]:
        """What the allocation has on each of its nodes."""
        shown = await _slurm("scontrol", "--detail", "--oneliner", "show", "job", self._job)
        found = re.findall(r"Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)", shown)
        nodes = []
        for names, cpus, memory, generic in found:
            gpus = sum(map(int, re.findall(r"gpu(?::[\w.-]+)?:(\d+)", generic)))
            share = SlurmNode("", _count_ids(cpus), gpus, int(memory) or None)
            nodes += [
                replace(share, name=name) for name in (await _slurm("scontrol", "show", "hostnames", names)).split()
            ]
        if not nodes:
            raise PlacementRefused(f"Slurm shows no nodes of job {self._job}; is it still running?")
        return nodes

    async def _address_of(self, node: str) -> str:
        shown = await _slurm("scontrol", "--oneliner", "show", "node", node)
        match = re.search(r"NodeAddr=(\S+)", shown)
        return match[1] if match else node


class SlurmStep:
    """Implements `Launched`: a keeper that `srun` started."""

    def __init__(self, process: asyncio.subprocess.Process, job: str, name: str, node: str) -> None:
        self._process = process
        self._job = job
        self._name = name
        self._node = node
        self._ended = asyncio.ensure_future(self._until_end())

    @property
    def ended(self) -> asyncio.Future[str]:
        return self._ended

    async def kill(self) -> None:
        """By Slurm, since a killed `srun` leaves its task alive."""
        for line in (await _slurm("squeue", "--steps", "-h", "-j", self._job, "-o", "%i %j")).splitlines():
            step, _, name = line.strip().partition(" ")
            if name.strip() == self._name:
                await _slurm("scancel", "--signal=KILL", step)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._ended), END_SECONDS)
        if self._process.returncode is None:
            self._process.kill()

    async def _until_end(self) -> str:
        assert self._process.stdout is not None
        tail = ""
        while chunk := await self._process.stdout.read(4096):
            tail = (tail + chunk.decode(errors="replace"))[-TAIL_CHARACTERS:]
        code = await self._process.wait()
        said = "; ".join(line.strip() for line in tail.splitlines() if line.strip())
        return f"ended with code {code} on {self._node}" + (f": {said}" if said else "")


def allocation_options(asks: Sequence[Ask], nodes: int) -> list[str]:
    """What `salloc` or `sbatch` is asked for, so that `asks` fit on so many nodes of equal size."""
    shares = [(0, 0, 0)] * nodes  # gpus, cpus, memory
    for ask in sorted(asks, key=_size, reverse=True):
        least = shares.index(min(shares))
        shares[least] = tuple(map(sum, zip(shares[least], _size(ask), strict=True)))  # type: ignore[assignment]
    gpus, cpus, memory = map(max, zip(*shares, strict=True))
    options = ["--job-name=areal", f"--nodes={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={max(1, cpus)}"]
    options += [f"--mem={memory}"] if memory else []
    options += [f"--gres=gpu:{gpus}"] if gpus else []
    return options


def pack(asks: Sequence[Ask], nodes: Sequence[SlurmNode]) -> tuple[list[tuple[str, SlurmNode]], list[SlurmNode]]:
    """A node for each ask, in their order, and what is free after that; the largest choose first.

    Those that belong together fill one node after the other, all others are dealt out evenly. Raises PlacementRefused
    if one finds no place.
    """
    free = list(nodes)
    chosen: dict[int, int] = {}
    guests = [0] * len(free)
    latest: dict[str, int] = {}
    """Where the last of each group went."""
    for number in sorted(range(len(asks)), key=lambda each: _size(asks[each]), reverse=True):
        ask = asks[number]
        beside = latest.get(ask.together) if any(_size(ask)) else None
        for index in sorted(range(len(free)), key=lambda each: (each != beside, guests[each])):
            left = free[index].without(ask)
            if left is not None:
                free[index] = left
                guests[index] += 1
                chosen[number] = index
                if ask.together:
                    latest[ask.together] = index
                break
        else:
            rest = "; ".join(map(str, free))
            raise PlacementRefused(
                f"the Slurm allocation has no place for {_said(ask)}; free are {rest}; ask for more, or for less each"
            )
    return [(asks[number].name, nodes[chosen[number]]) for number in range(len(asks))], free


def _without_driver(asks: Sequence[Ask], nodes: Sequence[SlurmNode]) -> list[SlurmNode]:
    """What the nodes have besides what the driver itself needs, if it is on one of them."""
    free = list(nodes)
    here = os.uname().nodename.partition(".")[0]
    index = next((index for index, node in enumerate(free) if node.name == here), None)
    for ask in asks:
        if ask.with_driver and index is not None:
            left = free[index].without(ask)
            if left is None:
                raise PlacementRefused(f"the driver's node must have room for {_said(ask)}; free are {free[index]}")
            free[index] = left
    return free


def _size(ask: Ask) -> tuple[int, int, int]:
    return ask.gpus or 0, ask.cpus, ask.memory_mib


def _said(ask: Ask) -> str:
    parts = [f"{ask.cpus} cpus"] if ask.cpus else []
    parts += [f"{ask.gpus} gpus"] if ask.gpus else []
    parts += [f"{ask.memory_mib} MiB"] if ask.memory_mib else []
    return f"{ask.name} ({', '.join(parts)})" if parts else ask.name


def _step_options(node: SlurmNode, ask: Ask) -> list[str]:
    options = ["--nodes=1", "--ntasks=1", f"--nodelist={node.name}", "--cpu-bind=none", "--unbuffered"]
    stated = bool(ask.cpus or ask.gpus or ask.memory_mib)
    options += ["--exact"] if stated else ["--overlap"]
    options.append(f"--cpus-per-task={ask.cpus or (1 if stated else node.cpus)}")
    if not stated:
        options.append("--mem=0")  # all that the allocation has there
    elif ask.memory_mib:
        options.append(f"--mem={ask.memory_mib}")
    if ask.gpus is not None:
        options.append(f"--gres=gpu:{ask.gpus}" if ask.gpus else "--gres=none")
    return options


def _step_environment() -> dict[str, str]:
    """Without what a surrounding step says of itself: `srun` would take it for wishes for the new one."""
    environment = child_environment(os.environ)
    return {name: value for name, value in environment.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}


async def _slurm(*argv: str) -> str:
    """What a command of Slurm's prints. Raises PlacementRefused with its complaint."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except FileNotFoundError:
        raise PlacementRefused(f"scheduler.type=slurm needs Slurm's programs, and there is no {argv[0]} here") from None
    try:
        printed, complaint = await asyncio.wait_for(process.communicate(), COMMAND_SECONDS)
    except TimeoutError:
        process.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_SECONDS)
        raise PlacementRefused(
            f"{' '.join(argv)} did not answer within {COMMAND_SECONDS:g} s; is slurmctld up?"
        ) from None
    if process.returncode:
        raise PlacementRefused(f"{' '.join(argv)} failed: {complaint.decode(errors='replace').strip()}")
    return printed.decode()


async def _free_nodes() -> str:
    """Each node of the cluster with its state and what it has, as people read it."""
    try:
        shown = await _slurm("sinfo", "-h", "-N", "-o", "  %N %t, cpus allocated/idle/other/total %C, %m MiB, gres %G")
    except PlacementRefused as error:
        return f"  unknown: {error}"
    return "\n".join(dict.fromkeys(line.rstrip() for line in shown.splitlines()))


async def _why_refused(holder: asyncio.subprocess.Process, seconds: float) -> str:
    """Take back the request that was not granted, and say why it was not."""
    assert holder.stderr is not None
    text = ""
    with suppress(TimeoutError):  # one that still waits does not close it
        async with asyncio.timeout(STDERR_SECONDS):
            while chunk := await holder.stderr.read(4096):
                text += chunk.decode(errors="replace")
    if queued := re.search(r"job (\d+) queued", text):
        state = (await _slurm("squeue", "-h", "-j", queued[1], "-o", "%r")).strip()
        holder.terminate()  # salloc then takes its request back
        await asyncio.wait_for(holder.wait(), END_SECONDS)
        return f"it was not granted within {seconds:g} s ({state or 'no reason given'})"
    await asyncio.wait_for(holder.wait(), END_SECONDS)
    said = [line.removeprefix("salloc: ").strip() for line in text.splitlines() if "error:" in line]
    return "; ".join(said) or text.strip()


def _count_ids(ranges: str) -> int:
    """How many numbers `0-3,8` names."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
