"""Weights go to the engine through shared memory; where that has no room, the run says so before it writes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from areal.api.errors import ArealError, WeightMismatch
from areal.engine.model.published import WeightReader, WeightWriter, shared_memory


@pytest.fixture
def directory() -> object:
    directory = shared_memory() / "areal-test-of-room"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def test_weights_larger_than_shared_memory_are_refused_with_what_is_missing(directory: Path) -> None:
    values = shutil.disk_usage(directory).total // 2  # of 4 bytes each: twice the room that there is
    with pytest.raises(ArealError) as refused:
        WeightWriter(directory, [("large", torch.empty(1).expand(values))])
    message = str(refused.value)
    assert f"need {values * 4 / 2**20:,.1f} MiB for model.safetensors" in message
    assert f"{directory.parent} has " in message
    assert "MiB free: " in message
    assert "--shm-size" in message


FILL = """
import sys
from pathlib import Path
import torch
from areal.api.errors import ArealError
from areal.engine.model.published import WeightWriter

try:
    Path(sys.argv[1], "weights").mkdir()
    WeightWriter(Path(sys.argv[1], "weights"), [("all", torch.ones(3 << 17))]).write(0)
except ArealError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.slow
def test_full_shared_memory_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    """In a file system of 2 MiB there is room for one slot of 1.5 MiB, not for two."""
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=2m tmpfs {tmp_path}"
    if shutil.which("unshare") is None or subprocess.run([*mounted, mount], capture_output=True).returncode:
        pytest.skip("a file system of its own needs user namespaces, which this machine forbids")
    ended = subprocess.run(
        [*mounted, f'{mount} && exec "$0" "$@"', sys.executable, "-c", FILL, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1, (ended.returncode, ended.stderr)
    assert "refused: the weights that are shared with the engines need 1.5 MiB" in ended.stderr
    assert f"{tmp_path} has 0.5 MiB free: No space left on device;" in ended.stderr


def test_weights_with_a_damaged_header_are_refused_by_their_digest(tmp_path: Path) -> None:
    weights = [("w", torch.ones(8))]
    update = WeightWriter(tmp_path, weights).write(0)
    file = Path(update.path) / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole.replace(b"F32", b"X32"), whole.replace(b"shape", b"shaqe"), b"\xff" * len(whole)):
        file.write_bytes(damaged)
        with pytest.raises(WeightMismatch, match="must have the digest"):
            WeightReader().read(update, weights)
