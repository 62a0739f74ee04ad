"""What a run needs of its machine, each thing looked at and tried out: found, and if not, what to do.

Checks come one by one, those that load torch last, so that the first line is there at once.
"""

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from areal import __version__
from areal.api.errors import ArealError, ConfigError, ModelError
from areal.config.backend import SERVER_REMEDY, SERVERS, Backend
from areal.config.experiment import PPOConfig
from areal.config.parallel import Ranks
from areal.engine.host_memory import SHARED_MEMORY, small_files
from areal.engine.sizing import GIB
from areal.infra.rpc.sockets import address_towards
from areal.infra.scheduler.local import GPU_FILES
from areal.utils.installing import DISTRIBUTION, OTHER, TESTED_TORCH, install_hint, other_project

State = Literal["ok", "note", "missing"]
MARKS: dict[State, tuple[str, str]] = {"ok": ("✓", "green"), "note": ("!", "yellow"), "missing": ("✗", "red")}
OLDEST_PYTHON = (3, 11)
ENOUGH_FILES = 4096
ENOUGH_SHM_BYTES = 256 << 20
ASK_SECONDS = 20.0
"""How long a program that is asked for its version may take."""
SOME_OTHER_HOST = "192.0.2.1"
"""Reserved for examples. Nothing is sent to it: it only stands for a host that is not this one."""
SLURM_PROGRAMS = ("sinfo", "squeue", "salloc", "sbatch", "srun", "scontrol")
MODEL = "model"
"""The name of the check without which nothing can be planned."""


@dataclass(frozen=True)
class Check:
    name: str
    state: State
    found: str
    remedy: str = ""


def all_checks(config: PPOConfig, *, chosen: bool) -> Iterator[Check]:
    """Of the machine. `chosen` = the config is the user's own, so what it names must be there."""
    yield check_python()
    yield check_distribution()
    yield check_compiler()
    yield check_ports(config.scheduler.address, needed=chosen and config.scheduler.type != "local")
    yield check_shared_memory()
    yield check_open_files()
    yield from check_schedulers(config, chosen=chosen)
    yield from check_engines(config, chosen=chosen)
    yield check_sandbox()
    yield from check_torch()
    if find_spec("torch") is not None:
        yield check_kernel(config)


def check_model(path: str, backend: str) -> Iterator[Check]:
    """Its files, whether the ranks of `backend`, if there are any, can train it, and its template."""
    try:
        with small_files(path) as directory:
            if backend:
                yield check_sharding(backend, directory)
            yield check_template(path if path.startswith("builtin:") else directory)
    except ModelError as error:
        found, _, remedy = str(error).partition("; ")
        yield Check(MODEL, "missing", found, remedy)


def check_python() -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Check("Python", "missing", found, f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    return Check("Python", "ok", found)


def check_distribution() -> Check:
    name, other = "distribution", other_project()
    if other is not None:
        found = f"{OTHER} {other}, another project with a package areal, is installed beside this one"
        return Check(name, "note", found, f"pip uninstall {OTHER}, then install {DISTRIBUTION} again")
    return Check(name, "ok", f"{DISTRIBUTION} {__version__}")


def check_torch() -> Iterator[Check]:
    """torch and what it computes on; loading it takes seconds."""
    if find_spec("torch") is None:
        yield Check("torch", "missing", "not installed", f"pip install '{TESTED_TORCH}'")
        return
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__} ({build}), {os.cpu_count()} cores"
    same = torch.__version__.split("+")[0] == TESTED_TORCH.partition("==")[2]
    yield Check("torch", "ok" if same else "note", found, "" if same else f"this package is tested with {TESTED_TORCH}")
    names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    if names:
        sizes = ", ".join(f"{each.name} ({each.total_memory / GIB:.0f} GiB)" for each in names)
        yield Check("accelerators", "ok", f"{len(names)}: {sizes}")
    elif torch.backends.mps.is_available():
        yield Check("accelerators", "ok", "Apple's GPU (mps)")
    elif GPU_FILES.is_dir() and any(GPU_FILES.iterdir()):
        yield Check("accelerators", "note", "NVIDIA GPUs that torch cannot use", "install torch's CUDA build")
    else:
        yield Check("accelerators", "ok", f"none; models are computed on {os.cpu_count()} CPU cores")


def check_kernel(config: PPOConfig) -> Check:
    """What would compute the embedded engine's steps; tried out, which compiles it once."""
    from areal.engine.model.device import find_device
    from areal.engine.native.library import load

    name, rollout = "engine kernel", config.rollout
    if rollout.kernel == "torch":
        return Check(name, "ok", "torch (rollout.kernel=torch)")
    try:
        if (device := find_device(rollout.device, "rollout.device").type) != "cpu":
            return Check(name, "ok", f"torch, on {device}")
        return Check(name, "ok", f"native ({load().name})")
    except ArealError as error:
        found, _, remedy = str(error).rpartition("; ")
        needed = rollout.kernel == "native"
        return Check(name, "missing" if needed else "note", f"{'' if needed else 'torch: '}{found}", remedy)


def check_compiler() -> Check:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        path = shutil.which(name)
        if path is not None:
            return Check("C++ compiler", "ok", _answer([path, "--version"]) or path)
    return Check(
        "C++ compiler",
        "note",
        "none",
        "install g++ (apt-get install g++): the embedded engine and vLLM compile kernels",
    )


def check_ports(address: str | None, *, needed: bool) -> Check:
    """Loopback, and an address at which other hosts reach this one; `needed` = processes run there."""
    try:
        _listen("127.0.0.1")
    except OSError as error:
        return Check(
            "ports", "missing", f"cannot listen on 127.0.0.1: {error}", "allow processes to open loopback ports"
        )
    try:
        own = address or address_towards(SOME_OTHER_HOST)
        _listen(own)
    except (OSError, ArealError):
        where = address or "an own address"
        return Check(
            "ports",
            "missing" if needed else "note",
            f"loopback; cannot listen on {where}, so only processes of this machine reach it",
            "set scheduler.address to an address of this machine if processes run on others",
        )
    return Check("ports", "ok", f"loopback and {own}")


def _listen(host: str) -> None:
    with socket.create_server((host, 0)) as listening, socket.create_connection(listening.getsockname()[:2], 5.0):
        pass


def check_shared_memory() -> Check:
    if not os.access(SHARED_MEMORY, os.W_OK):
        return Check(
            "shared memory", "note", "no /dev/shm; weights are shared in files", "mount a tmpfs there for speed"
        )
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < ENOUGH_SHM_BYTES:
        return Check("shared memory", "note", found, "it holds two versions of the weights; docker run --shm-size=16g")
    return Check("shared memory", "ok", found)


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        most = "65536" if hard == resource.RLIM_INFINITY or hard >= 65536 else str(hard)
        return Check("open files", "note", found, f"many agents at once need more: ulimit -n {most}")
    return Check("open files", "ok", found)


def check_schedulers(config: PPOConfig, *, chosen: bool) -> Iterator[Check]:
    """Slurm and Ray, each only if it is chosen or found."""
    wanted = config.scheduler.type if chosen else "local"
    missing = [name for name in SLURM_PROGRAMS if shutil.which(name) is None]
    if wanted == "slurm" or not missing:
        yield _check_slurm(missing, "missing" if wanted == "slurm" else "note")
    if wanted == "ray" or _version_in(sys.executable, "ray"):
        address = config.scheduler.ray_address or os.environ.get("RAY_ADDRESS", "")
        yield _check_ray(address, "missing" if wanted == "ray" else "note")


def _check_slurm(missing: list[str], otherwise: State) -> Check:
    """`otherwise`: the state if it does not work."""
    if missing:
        return Check(
            "Slurm", "missing", f"no {', '.join(missing)}", "run where Slurm is installed, or scheduler.type=local"
        )
    nodes = _answer(["sinfo", "--noheader", "--format=%D"])
    if not nodes:
        return Check("Slurm", otherwise, "installed, but sinfo does not answer", "is slurmctld up? (scontrol ping)")
    return Check("Slurm", "ok", f"{_answer(['sinfo', '--version'])}, {sum(map(int, nodes.split()))} nodes")


def _check_ray(address: str, otherwise: State) -> Check:
    found = _version_in(sys.executable, "ray")
    if not found:
        return Check("Ray", "missing", "not installed", install_hint("ray"))
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return Check("Ray", "ok", f"{found}; no RAY_ADDRESS: a cluster of this machine, or a new one")
    try:
        socket.create_connection((host, int(port)), 5.0).close()
    except OSError as error:
        return Check(
            "Ray", otherwise, f"{found}; no answer at {address}: {error}", "ray start --head, or fix ray_address"
        )
    return Check("Ray", "ok", f"{found}, cluster at {address}")


def check_engines(config: PPOConfig, *, chosen: bool) -> Iterator[Check]:
    """The embedded engine always; vLLM and SGLang where `rollout.python` points."""
    rollout = config.rollout
    kind = Backend.parse(rollout.backend).kind if chosen else "embedded"
    yield Check("embedded engine", "ok", "part of this package")
    python = rollout.python or sys.executable
    for package, name in SERVERS.items():
        found = _version_in(python, package)
        if found:
            yield Check(name, "ok", f"{found} in {python}")
        elif kind == package and not rollout.addresses:
            yield Check(name, "missing", f"not in {python}", SERVER_REMEDY)


def _version_in(python: str, package: str) -> str:
    """Empty = it is not installed. A directory that happens to have its name can be imported, and has no version."""
    if python == sys.executable:
        try:
            return version(package)
        except PackageNotFoundError:
            return ""
    return _answer([python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"])


def check_sharding(backend: str, directory: Path) -> Check:
    """Whether these ranks can train the model, which its config says, and whether there is what they need."""
    from areal.engine.sharded.trainable import require_trainable

    try:
        require_trainable(directory, Ranks.parse(backend))
    except ModelError as error:
        found, _, remedy = str(error).partition("; ")
        return Check("ranks", "missing", found, remedy)
    if find_spec("accelerate") is None:
        return Check("ranks", "missing", f"actor.backend={backend} needs accelerate", install_hint("fsdp"))
    return Check("ranks", "ok", f"transformers {version('transformers')} with accelerate {version('accelerate')}")


def check_sandbox() -> Check:
    from areal.reward.sandbox import find_isolation

    try:
        return Check("sandbox", "ok", f"programs of a model run isolated by {find_isolation()}")
    except ConfigError as error:
        _, _, remedy = str(error).partition("). ")
        return Check("sandbox", "note", "code_reward cannot isolate programs here", remedy)


def check_template(place: str | Path) -> Check:
    """Whether conversations with this model only ever grow."""
    from areal.trajectory.forks import continuations
    from areal.trajectory.rendering import Renderer
    from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer

    name = "chat template"
    try:
        renderer = Renderer(load_hf_tokenizer(place), processor=load_hf_processor(place))
    except (ArealError, OSError, ValueError) as error:
        return Check(name, "note", str(error), "name a directory with tokenizer.json and a chat template")
    played = list(continuations(renderer))
    refused = [each.name for each in played if each.appends is None]
    forks = [each.name for each in played if each.appends is False]
    note = f"; refuses {' and '.join(refused)}" if refused else ""
    if forks:
        return Check(
            name,
            "note",
            f"forks before {' and '.join(forks)}: the past is rendered differently then{note}",
            "training stays exact, but a fork computes its past again; a template that keeps earlier thinking appends",
        )
    return Check(name, "ok", f"appends: {', '.join(each.name for each in played if each.appends)}{note}")


def _answer(argv: list[str]) -> str:
    """The first line that a program prints; empty if it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.splitlines()), "").strip() if done.returncode == 0 else ""
