"""A command outside an allocation becomes a batch job whose log is followed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.api.errors import PlacementRefused
from areal.cli.submit import submit
from benchmarks.clusters import SlurmCluster, until


@pytest.fixture(autouse=True)
def _use(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    yield
    cluster.run("scancel", "--user=root")  # what a failed test left would take the place of the next


@pytest.fixture
def shared(cluster: SlurmCluster) -> Path:
    """A directory that every host sees."""
    return cluster.config.parent


def test_its_log_is_shown_and_its_exit_code_returned(shared: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = submit([sys.executable, "-c", "print('hello from the job'); raise SystemExit(7)"], [], shared)
    assert code == 7
    printed = capfd.readouterr()
    assert "submitted as Slurm job" in printed.out
    assert "hello from the job" in printed.out
    assert "ended as failed" in printed.err


def test_an_impossible_job_is_refused(shared: Path) -> None:
    with pytest.raises(PlacementRefused, match="Memory specification"):
        submit(["true"], ["--mem=99999999"], shared)


def test_ctrl_c_asks_the_job_to_end(shared: Path, cluster: SlurmCluster) -> None:
    saved = shared / "saved"
    job = (
        "import signal, sys, time\n"
        f"def end(*_): open({str(saved)!r}, 'w').close(); sys.exit(5)\n"
        "signal.signal(signal.SIGINT, end)\nprint('begun', flush=True)\ntime.sleep(600)\n"
    )
    follow = (
        "import signal, sys; from pathlib import Path; from areal.cli.submit import submit; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # the tests may run where it is ignored
        f"sys.exit(submit({[sys.executable, '-c', job]!r}, [], Path({str(shared)!r})))"
    )
    follower = subprocess.Popen(
        [sys.executable, "-c", follow], stdout=subprocess.PIPE, text=True, env={**os.environ, **cluster.env}
    )
    assert follower.stdout is not None
    assert any("begun" in line for line in iter(follower.stdout.readline, "")), "the job did not begin"
    follower.send_signal(signal.SIGINT)
    assert follower.wait(30) == 5
    until(saved.exists, 5, "checkpoint")
