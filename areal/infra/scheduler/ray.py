"""Keepers on the nodes of a Ray cluster: one placement group for the run, and a small actor for each keeper.

Ray places and watches. It carries neither messages nor logs, so agents need to know nothing of it. The secret travels
as a method's argument, which is shown nowhere; a `runtime_env` would be, on Ray's dashboard.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from areal.api.errors import PlacementRefused
from areal.infra.scheduler.base import Ask, KeeperStart, child_environment
from areal.utils.installing import install_hint
from areal.utils.process_pool.descendants import children_of

MIB = 1 << 20
UNSTATED_CPUS = 0.001
"""Ray's bundles must not be empty."""
TAIL_CHARACTERS = 400
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""How Ray tells a process which GPUs are its own."""


class RayLauncher:
    def __init__(self, address: str | None = None) -> None:
        """`address` as `ray.init` takes it; None = RAY_ADDRESS, else a cluster of this machine, else a new one."""
        self._address = address
        self._ray: Any = None
        self._owned = False
        """Whether the connection to the cluster was made here."""
        self._group: Any = None
        self._bundles: dict[str, int] = {}
        self._actors: dict[str, Any] = {}

    @property
    def host(self) -> str:
        assert self._ray is not None, "reserve() comes first"
        return str(self._ray.util.get_node_ip_address())

    async def reserve(self, asks: Sequence[Ask], timeout_seconds: float) -> None:
        await asyncio.to_thread(self._connect)
        await asyncio.to_thread(self._reserve, asks, timeout_seconds)

    async def launch(self, ask: Ask, keeper: KeeperStart) -> "RayKeeper":
        await asyncio.to_thread(self._connect)
        actor = await asyncio.to_thread(self._place, ask)
        environment = {k: v for k, v in child_environment(os.environ).items() if k not in GPU_VARIABLES}
        return RayKeeper(self._ray, actor, actor.run.remote(keeper.argv, keeper.stdin, environment))

    async def close(self) -> None:
        if self._ray is not None:
            await asyncio.to_thread(self._close)

    def _connect(self) -> None:
        if self._ray is not None:
            return
        try:
            import ray
            import ray.util
        except ImportError:
            raise PlacementRefused(
                f"scheduler.type=ray needs Ray, which is not installed; {install_hint('ray')}"
            ) from None
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, log_to_driver=False, include_dashboard=False, configure_logging=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise PlacementRefused(f"no connection to the Ray cluster: {error}") from None
            self._owned = True
        self._ray = ray

    def _reserve(self, asks: Sequence[Ask], timeout_seconds: float) -> None:
        here = {f"node:{self.host}": UNSTATED_CPUS}
        bundles = [_resources(ask) | (here if ask.with_driver else {}) for ask in asks]
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        if not group.wait(timeout_seconds):
            self._ray.util.remove_placement_group(group)
            asked = "; ".join(f"{ask.name}: {_said(each)}" for ask, each in zip(asks, bundles, strict=True))
            raise PlacementRefused(
                f"the Ray cluster gave no place within {timeout_seconds:g} s for {asked}; "
                f"it has {_said(self._ray.cluster_resources())}, free are {_said(self._ray.available_resources())}"
            )
        self._group = group
        self._bundles = {ask.name: index for index, ask in enumerate(asks)}

    def _place(self, ask: Ask) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if (old := self._actors.pop(ask.name, None)) is not None:  # its keeper has ended, its place is wanted again
            self._ray.kill(old)
        resources = _resources(ask)
        options: dict[str, Any] = {
            "num_cpus": resources["CPU"],
            "num_gpus": ask.gpus or 0,
            "memory": ask.memory_mib * MIB or None,
            "max_restarts": 0,
            "max_concurrency": 2,  # `run` and `kill`
        }
        if ask.name in self._bundles:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundles[ask.name]
            )
        self._actors[ask.name] = actor = self._ray.remote(KeeperHost).options(**options).remote()
        return actor

    def _close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._owned:
            self._ray.shutdown()
        self._ray = None


class RayKeeper:
    """Implements `Launched`: a keeper under an actor."""

    def __init__(self, ray: Any, actor: Any, running: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._ended = asyncio.ensure_future(self._until_end(running))

    @property
    def ended(self) -> asyncio.Future[str]:
        return self._ended

    async def kill(self) -> None:
        with suppress(Exception):  # the actor has died, and Ray's own errors are many
            await asyncio.wait_for(_future(self._actor.kill.remote()), 5.0)

    async def _until_end(self, running: Any) -> str:
        try:
            said: str = await _future(running)
        except Exception as error:
            first = str(error).strip().splitlines()[0]
            return f"was lost with its Ray actor: {type(error).__name__}: {first}"
        return said


class KeeperHost:
    """The actor: starts a keeper on its node, and waits for its end."""

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[bytes] | None = None
        self._unwanted = False
        self._lock = threading.Lock()
        """Ray calls `run` and `kill` in threads, in either order."""

    def run(self, argv: list[str], stdin: bytes, environment: Mapping[str, str]) -> str:
        own = {name: os.environ[name] for name in GPU_VARIABLES if name in os.environ}
        with self._lock:
            if self._unwanted:
                return "was killed before it started"
            self._keeper = subprocess.Popen(
                [sys.executable, *argv[1:]],  # this node's interpreter, which may be elsewhere than the driver's
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**environment, **own},
                start_new_session=True,
            )
        printed, _ = self._keeper.communicate(stdin)
        tail = "; ".join(line for line in printed.decode(errors="replace").splitlines() if line.strip())
        said = f": {tail[-TAIL_CHARACTERS:]}" if tail else ""
        return f"ended with code {self._keeper.returncode} on {os.uname().nodename}{said}"

    def kill(self) -> None:
        """Its descendants too: a keeper that is killed cannot end them."""
        with self._lock:
            self._unwanted = True
            pids = _tree(self._keeper.pid) if self._keeper is not None and self._keeper.poll() is None else []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _tree(root: int) -> list[int]:
    """A process and its descendants."""
    return [root, *(pid for child in children_of(root) for pid in _tree(child))]


def _future(ref: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(ref.future())


def _resources(ask: Ask) -> dict[str, float]:
    resources: dict[str, float] = {"CPU": ask.cpus or UNSTATED_CPUS}
    if ask.gpus:
        resources["GPU"] = ask.gpus
    if ask.memory_mib:
        resources["memory"] = ask.memory_mib * MIB
    return resources


def _said(resources: Mapping[str, float]) -> str:
    amounts = {"cpus": resources.get("CPU", 0), "gpus": resources.get("GPU", 0)}
    parts = [f"{amount:g} {unit}" for unit, amount in amounts.items() if amount >= 1 or unit == "cpus"]
    return ", ".join([*parts, f"{resources.get('memory', 0) / MIB:.0f} MiB"])
