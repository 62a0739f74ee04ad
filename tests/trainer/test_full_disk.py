"""A run on a full disk waits, says so in one line, and goes on when there is room, with nothing missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_of_groups import save_model
from full_disk_run import MOMENTS
from small_runs import make_engine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 100
OWN_MOUNTS = ["unshare", "--mount", "--propagation", "private"]


@pytest.fixture(autouse=True)
def _may_mount() -> None:
    try:
        tried = subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if tried.returncode != 0:
        pytest.skip("needs the right to mount")


@pytest.mark.parametrize("moment", MOMENTS)
def test_run_goes_on_when_there_is_room(tmp_path: Path, moment: str) -> None:
    model = save_model(tmp_path / "model", make_engine())
    disk = tmp_path / "disk"
    disk.mkdir()
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    script = Path(__file__).with_name("full_disk_run.py")
    done = subprocess.run(
        [*OWN_MOUNTS, sys.executable, str(script), str(disk), str(model), moment],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the record is whole\n")
