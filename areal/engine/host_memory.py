"""What this machine has, for the plan of a run, and how large the models are that the run has.

Of a model that has to be downloaded only the small files are fetched, and a built-in one is not made.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from areal.api.errors import ModelError
from areal.config.experiment import PPOConfig
from areal.engine.model.shape import ModelShape, read_shape
from areal.engine.model_path import builtin_name, model_directory
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


def model_shapes(config: PPOConfig) -> dict[str, ModelShape]:
    """Of every model that the run has, by its section."""
    paths = {"actor": config.actor.path}
    if config.algorithm.kl_ctl > 0:
        paths["ref"] = config.ref.path
    if config.critic.path:
        paths["critic"] = config.critic.path
    if config.teacher.path:
        paths["teacher"] = config.teacher.path
    return {name: _shape_of(path) for name, path in paths.items()}


def _shape_of(path: str) -> ModelShape:
    with small_files(path) as directory:
        return read_shape(directory)


@contextmanager
def small_files(path: str) -> Iterator[Path]:
    """A directory with the small files of a model, its config.json among them, for the length of the block."""
    name = builtin_name(path)
    if name is None:
        yield model_directory(path) or _download_small_files(path)
        return
    from areal.engine.models import DESCRIBED

    with TemporaryDirectory(prefix="areal-") as directory:
        DESCRIBED[name](Path(directory))
        yield Path(directory)


def _download_small_files(path: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.jinja", "*.model"]))
    except (OSError, ValueError) as error:  # the hub's errors are of both kinds
        raise ModelError(
            f"no directory {path!r} here, and its config cannot be fetched from the model hub "
            f"({error.__class__.__name__}); name a directory that has it"
        ) from None
