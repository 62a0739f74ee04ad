import json
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import KernelUnavailable
from areal.cli import main as command
from areal.cli.doctor import checks
from areal.cli.doctor.checks import Check
from areal.config.experiment import GRPOConfig
from areal.config.rollout import RolloutConfig
from areal.config.training import SchedulerConfig
from areal.engine.native import library
from areal.utils.installing import install_hint

ROOT = Path(__file__).parents[2]
LARGE = ROOT / "tests/engine/model_configs/qwen2.5-7b"
EXAMPLE = ROOT / "examples/agent_workflow/config.yaml"
NODE = ("--gpu-memory-gb", "80", "--gpus-per-node", "8", "--host-memory-gb", "1000")


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = command.main(["doctor", *words])
    return code, capsys.readouterr().out


def states(found: Sequence[Check]) -> dict[str, str]:
    return {check.name: check.state for check in found}


@pytest.mark.slow
def test_a_machine_that_has_all_ends_with_0_and_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = doctor(capsys)
    assert code == 0
    for name in ("Python", "torch", "accelerators", "C++ compiler", "ports", "shared memory", "open files", "sandbox"):
        assert f" {name} " in shown


@pytest.mark.slow
def test_the_example_fits_and_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, shown = doctor(capsys, "--config", str(EXAMPLE))
    assert code == 0
    assert "chat template" in shown
    assert shown.rstrip().endswith("fits")
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_with_1_and_says_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = doctor(
        capsys, f"actor.path={LARGE}", "actor.backend=fsdp:d8", "actor.gpus=1", "rollout.gpus=1", *NODE
    )
    assert code == 1
    said = " ".join(shown.split())
    assert "does not fit: " in said
    assert "GiB on actor ranks; set " in said


@pytest.mark.slow
def test_a_critic_counts_as_a_second_model_that_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    def needed(*words: str) -> float:
        arguments = ("--json", f"actor.path={LARGE}", "actor.backend=fsdp:d8", "actor.gpus=1", "rollout.gpus=1")
        found = json.loads(doctor(capsys, *arguments, *words, *NODE)[1])
        places = {each["place"]: each for each in found["memory"]}
        optimizer: float = places["actor ranks"]["terms"]["optimizer"]
        return optimizer

    alone = needed()
    assert needed(f"critic.path={LARGE}", "actor.group_baseline=none") == pytest.approx(2 * alone)


@pytest.mark.slow
def test_json_is_one_object_with_checks_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"actor.path={LARGE}", "actor.backend=fsdp:d8", "actor.gpus=1", "rollout.gpus=1", "--json")
    _, shown = doctor(capsys, *words, *NODE)
    report: dict[str, Any] = json.loads(shown)
    assert report["parameters"] == {"actor": 7_615_616_512}
    assert not report["fits"]
    places = {each["place"]: each for each in report["memory"]}
    assert places["actor ranks"]["remedies"]
    assert {"name", "state", "found", "remedy"} == set(report["checks"][0])


def test_figures_of_a_machine_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", "--gpu-memory-gb", "-1"]) == 2
    assert "--gpu-memory-gb must be > 0, got -1" in capsys.readouterr().err


@pytest.mark.slow
def test_an_engine_that_was_chosen_and_is_not_there_is_missing() -> None:
    config = GRPOConfig(rollout=RolloutConfig(backend="sglang", python="/no/such/python"))
    (chosen,) = [each for each in checks.check_engines(config, chosen=True) if each.name == "SGLang"]
    assert chosen.state == "missing"
    assert "rollout.python" in chosen.remedy
    assert states(list(checks.check_engines(config, chosen=False))) == {"embedded engine": "ok"}


def test_schedulers_are_looked_at_only_if_chosen_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(checks, "_version_in", lambda python, package: "")
    assert list(checks.check_schedulers(GRPOConfig(), chosen=True)) == []
    slurm = GRPOConfig(scheduler=SchedulerConfig(type="slurm"))
    assert states(list(checks.check_schedulers(slurm, chosen=True))) == {"Slurm": "missing"}
    ray = GRPOConfig(scheduler=SchedulerConfig(type="ray"))
    (found,) = checks.check_schedulers(ray, chosen=True)
    assert found.remedy == install_hint("ray")


def test_an_address_that_is_not_this_machines_is_missing_only_if_others_need_it() -> None:
    elsewhere = "192.0.2.77"
    assert checks.check_ports(elsewhere, needed=False).state == "note"
    assert checks.check_ports(elsewhere, needed=True).state == "missing"
    assert checks.check_ports("127.0.0.1", needed=True).state == "ok"


def test_loopback_that_cannot_be_listened_on_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise PermissionError("no sockets here")

    monkeypatch.setattr(socket, "create_server", refuses)
    assert checks.check_ports(None, needed=False).state == "missing"


def test_a_model_without_tokenizer_is_a_note() -> None:
    check = checks.check_template(str(LARGE))
    assert check.state == "note"
    assert "tokenizer.json" in check.remedy


def test_the_builtin_templates_append() -> None:
    for name in ("builtin:tiny-math", "builtin:tiny-countdown"):
        assert checks.check_template(name).state == "ok", name


def test_no_compiler_is_a_note_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert checks.check_compiler().state == "note"
    assert "g++" in checks.check_compiler().remedy


def test_ranks_that_cannot_train_the_model_are_missing_with_a_backend_that_works() -> None:
    ranks, _ = checks.check_model(str(LARGE), "fsdp:d2t3")
    assert ranks.state == "missing"
    assert "num_attention_heads, which is 28" in ranks.found
    assert ranks.remedy == "set it to fsdp:d3t2"


def test_ranks_without_accelerate_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    ranks, _ = checks.check_model(str(LARGE), "fsdp:d2t2")
    assert (ranks.state, ranks.remedy) == ("missing", install_hint("fsdp"))
    assert "accelerate" in ranks.found


@pytest.mark.slow
def test_a_model_that_is_not_there_is_named_once_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, shown = doctor(capsys, f"actor.path={tmp_path}/none", "actor.backend=fsdp:d2", "--json")
    assert code == 1
    report = json.loads(shown)
    (found,) = [each for each in report["checks"] if "no model directory" in each["found"]]
    assert found["remedy"] == "name one, a run's, a Hugging Face id, or builtin:tiny-math"
    assert "memory" not in report


@pytest.mark.slow
def test_the_kernel_of_the_engine_is_told_and_missing_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> Any:
        raise KernelUnavailable("the native kernel needs a C++ compiler, and none was found; install g++")

    settings = GRPOConfig()
    settings.rollout = RolloutConfig(kernel="torch")
    assert checks.check_kernel(settings) == Check("engine kernel", "ok", "torch (rollout.kernel=torch)")
    monkeypatch.setattr(library, "load", refuse)
    for kernel, state in (("auto", "note"), ("native", "missing")):
        settings.rollout = RolloutConfig(kernel=kernel, device="cpu")  # type: ignore[arg-type]
        found = checks.check_kernel(settings)
        assert (found.state, found.remedy) == (state, "install g++")
        assert "none was found" in found.found
