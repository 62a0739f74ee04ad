"""What this machine has, for the plan of a run, and where the files of a model are."""

import os
import shutil
from pathlib import Path

from areal.api.errors import ModelError
from areal.engine.sizing import GIB, HostMemory

SHARED_MEMORY = Path("/dev/shm")


def this_machine(
    gpu_memory_gb: float | None = None, gpus_per_node: int | None = None, host_memory_gb: float | None = None
) -> HostMemory:
    """This one, or one whose figures are given in place of its own."""
    gpu_bytes, gpus = (0, 1) if gpu_memory_gb is not None else _gpus()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    elsewhere = host_memory_gb is not None
    if host_memory_gb is not None:
        host = int(host_memory_gb * GIB)
    shm = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return HostMemory(
        host_bytes=host,
        shm_bytes=host // 2 if elsewhere or not shm else shm,  # Linux gives shared memory half of the host's
        gpu_bytes=int(gpu_memory_gb * GIB) if gpu_memory_gb is not None else gpu_bytes,
        gpus_per_node=gpus_per_node or gpus,
    )


def _gpus() -> tuple[int, int]:
    """The memory of the smallest, and how many there are."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [int(torch.cuda.get_device_properties(index).total_memory) for index in range(count)]
    return (min(sizes), count) if sizes else (0, 1)


def find_files(path: str) -> Path:
    """The directory of a model, for its small files: of one that has to be downloaded, its weights are not."""
    if path.startswith("builtin:"):
        from areal.engine.models import find_model

        return find_model(path)
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if path.count("/") != 1 or path.startswith((".", "~", "/")):
        raise ModelError(f"no model directory at {path!r}; name one that has a config.json (--model DIR)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.jinja", "*.model"]))
    except (OSError, ValueError) as error:  # the hub's errors are of both kinds
        raise ModelError(
            f"the config of {path!r} cannot be fetched ({error.__class__.__name__}); name a directory that has it "
            "(--model DIR)"
        ) from None
