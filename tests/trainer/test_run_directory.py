"""A run's directory belongs to one process, is resumed or refused, and is never overwritten."""

import errno
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_runs import make_config, make_directory

from areal.api.errors import ArealError, RunExists
from areal.config.experiment import PPOConfig
from areal.config.loader import build
from areal.config.rollout import ProxyConfig
from areal.config.training import RecoverConfig
from areal.trainer.run_directory import RunDirectory, explained_storage_errors


def test_config_that_is_written_reads_back_the_same(tmp_path: Path) -> None:
    config = make_config(tmp_path, seed=7, total_train_steps=3)
    run = RunDirectory.open(config)
    assert run.path == tmp_path / "test" / "one"
    assert build(PPOConfig, yaml.safe_load((run.path / "config.yaml").read_text())) == config
    run.close()


def test_admin_key_is_not_written_to_the_run(tmp_path: Path) -> None:
    run = make_directory(tmp_path, proxy=ProxyConfig(admin_key="a-key-of-ones-own"))
    assert "a-key-of-ones-own" not in (run.path / "config.yaml").read_text()
    run.close()


def test_runs_without_a_name_get_one_each(tmp_path: Path) -> None:
    run = make_directory(tmp_path, trial_name=None)
    assert run.path.parent == tmp_path / "test"
    assert run.path.name
    run.close()


def test_logs_are_for_their_owner_only_also_in_a_directory_that_was_there(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    assert stat.S_IMODE(run.logs.stat().st_mode) == 0o700
    run.logs.chmod(0o755)
    run.close()
    run = make_directory(tmp_path, recover=RecoverConfig(mode="auto"))
    assert stat.S_IMODE(run.logs.stat().st_mode) == 0o700
    run.close()


def test_unfinished_run_is_resumed(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    (run.path / "metrics.jsonl").write_text('{"step": 0}\n')
    run.close()
    again = make_directory(tmp_path, recover=RecoverConfig(mode="auto"))
    assert again.path == run.path
    assert (again.path / "metrics.jsonl").read_text() == '{"step": 0}\n'
    again.close()


def test_unfinished_run_is_refused_where_recovery_is_off(tmp_path: Path) -> None:
    make_directory(tmp_path).close()
    with pytest.raises(RunExists, match=r"test/one exists .*recover\.mode=auto"):
        make_directory(tmp_path, recover=RecoverConfig(mode="off"))


def test_finished_run_is_refused_whatever_is_asked(tmp_path: Path) -> None:
    run = make_directory(tmp_path)
    run.finish({"steps": 1, "verdict": "0.1 → 0.9"})
    run.close()
    assert json.loads((run.path / "summary.json").read_text()) == {"steps": 1, "verdict": "0.1 → 0.9"}
    for mode in ("auto", "off"):
        with pytest.raises(RunExists, match=r"test/one is finished .*choose another trial_name"):
            make_directory(tmp_path, recover=RecoverConfig(mode=mode))


@pytest.mark.slow
def test_run_in_use_is_refused_until_its_process_lets_go(tmp_path: Path) -> None:
    hold = (
        "import sys\nfrom pathlib import Path\nfrom areal.config.experiment import PPOConfig\n"
        "from areal.config.rollout import GenerationHyperparameters\n"
        "from areal.trainer.run_directory import RunDirectory\n"
        "config = PPOConfig(experiment_name='test', trial_name='one', output_dir=sys.argv[1],\n"
        "                   gconfig=GenerationHyperparameters(n_samples=4))\n"
        "run = RunDirectory.open(config)\nprint('taken', flush=True)\nsys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        with pytest.raises(RunExists, match="being trained by another process"):
            make_directory(tmp_path)
        holder.kill()
    make_directory(tmp_path).close()


def test_directory_that_cannot_be_made_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArealError, match=r"^cannot write to .*file/test/one: Not a directory; .*set output_dir$"):
        make_directory(tmp_path / "file")


def test_full_disk_is_reported_in_one_line_and_other_errors_keep_their_type(tmp_path: Path) -> None:
    full = r"^cannot write to .*: No space left on device; free some space"
    with pytest.raises(ArealError, match=full), explained_storage_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ConnectionResetError), explained_storage_errors(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset")
