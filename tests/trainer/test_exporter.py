"""What a run shows to Prometheus, read back with Prometheus' own parser."""

import asyncio
import math
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from small_runs import make_directory

from areal.api.errors import RejectReason
from areal.config.errors import ConfigError
from areal.config.experiment import DatasetConfig, ExperimentConfig, SFTConfig
from areal.config.training import MetricsConfig, SaverConfig
from areal.infra.loop_thread import LoopThread
from areal.trainer import exporter as exporter_module
from areal.trainer.exporter import METRICS, OF_A_FLEET, Exporter, Samples
from areal.trainer.fleet import FleetStatus
from areal.trainer.run_directory import RunDirectory

Page = dict[tuple[str, ...], float]
"""The value of each series: the name of a metric, then the values of its labels in the order of `METRICS`."""


def parse(text: str) -> Page:
    page: Page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert family.documentation, f"{sample.name} has no HELP"
            assert family.type == METRICS[sample.name].kind
            page[sample.name, *(sample.labels[label] for label in METRICS[sample.name].labels)] = sample.value
    return page


def scrape(exporter: Exporter) -> Page:
    answer = httpx.get(exporter.url, timeout=30, trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse(answer.text)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with make_directory(tmp_path) as made:
        yield made


def open_exporter(directory: RunDirectory, **settings: Any) -> Exporter:
    config = ExperimentConfig(metrics=MetricsConfig(**{"port": 0, **settings}))
    return Exporter(config, directory, total_steps=9)


class FakeCluster:
    """Stands in for `Cluster`: an event loop, and processes that have used so much."""

    def __init__(self) -> None:
        self.loop = LoopThread()
        self.cpu = {"driver": 1.0, "engine": 5.0}
        self.hangs = False
        self.processes = self
        self.deaths = Counter({"engine": 1})
        self.restarts = Counter({"engine": 1})

    def begin(self, work: Any) -> Any:
        return self.loop.begin(work)

    async def cpu_seconds(self, timeout_seconds: float) -> dict[str, float]:
        if self.hangs:
            await asyncio.Event().wait()
        return dict(self.cpu)


@pytest.fixture
def cluster() -> Iterator[Any]:
    made = FakeCluster()
    yield made
    made.loop.close()


def fake_fleet(**figures: Any) -> Any:
    status = FleetStatus(
        engines={"serving": 2, "dead": 1},
        workers={"present": 1, "absent": 0},
        weight_updates=3,
        staging_seconds=1.5,
        swapping_seconds=0.5,
        version=7,
        episodes={"running": 8, "ready": 4, "evaluating": 0},
        rejected={"training": {RejectReason.STALE: 2}, "evaluation": {}},
        sampled_tokens=100,
    )
    for name, value in figures.items():
        setattr(status, name, value)

    class FakeFleet(SimpleNamespace):
        __hash__ = object.__hash__

    return FakeFleet(status=lambda: status)


def test_counters_and_only_counters_end_in_total() -> None:
    assert {name: metric.kind for name, metric in METRICS.items() if metric.kind == "counter"} == {
        name: "counter" for name in METRICS if name.endswith("_total")
    }


def test_labels_of_any_text_and_numbers_of_any_kind_come_back_as_they_were() -> None:
    samples = Samples()
    odd = ['a "quoted" name', "back\\slash", "two\nlines", 'all\\"\n', "ümläut, {brace}", ""]
    for number, name in enumerate(odd):
        samples.set(number, "areal_figure", name)
    samples.set(math.inf, "areal_loss")
    samples.set(-math.inf, "areal_reward")
    samples.set(math.nan, "areal_gradient_norm")
    page = parse(samples.text())
    assert [page["areal_figure", name] for name in odd] == list(range(len(odd)))
    assert page["areal_loss",] == math.inf
    assert page["areal_reward",] == -math.inf
    assert math.isnan(page["areal_gradient_norm",])


def test_what_a_source_counts_is_added_to_what_others_counted_before() -> None:
    class Source: ...

    samples, first, second = Samples(), Source(), Source()
    for source, total, shown in [(first, 5, 5), (first, 8, 8), (second, 2, 10), (second, 2, 10), (second, 9, 17)]:
        samples.follow(source, total, "areal_cpu_seconds_total", "engine")
        assert samples.totals["areal_cpu_seconds_total", "engine"] == shown


def test_figures_of_steps_are_shown_and_added_up(directory: RunDirectory) -> None:
    with open_exporter(directory) as exporter:
        exporter.begin(2)
        exporter.step(2, {"eval_reward": 0.25, "eval_greedy_reward": 0.5})
        exporter.step(3, {"reward": 0.5, "tokens": 10.0, "wait_seconds": 2.0, "own": 7.0, "rejected/stale": 3.0})
        exporter.step(4, {"reward": 0.75, "tokens": 5.0, "wait_seconds": 1.0, "loss": None, "lr": math.nan})
        page = scrape(exporter)
    assert page["areal_step",] == 4
    assert page["areal_target_steps",] == 9
    assert page["areal_steps_total",] == 2
    assert page["areal_reward",] == 0.75
    assert page["areal_held_out_reward", "sampled"] == 0.25
    assert page["areal_held_out_reward", "greedy"] == 0.5
    assert page["areal_trained_tokens_total",] == 15
    assert page["areal_trainer_seconds_total", "waiting"] == 3
    assert page["areal_figure", "own"] == 7
    assert math.isnan(page["areal_learning_rate",])
    assert ("areal_loss",) not in page
    assert ("areal_figure", "rejected/stale") not in page
    assert page["process_start_time_seconds",] < page["areal_last_step_timestamp_seconds",]


def test_the_cluster_and_the_fleet_are_asked_when_somebody_looks(
    directory: RunDirectory, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module, "FRESH_SECONDS", 0.0)
    with open_exporter(directory) as exporter, exporter.watching(cluster, fake_fleet()):
        scrape(exporter)
        cluster.cpu["engine"] = 6.0
        page = scrape(exporter)
    assert page["areal_engines", "serving"] == 2
    assert page["areal_episodes", "ready"] == 4
    assert page["areal_weight_version",] == 7
    assert page["areal_rejected_episodes_total", "stale", "training"] == 2
    assert page["areal_rejected_episodes_total", "timeout", "evaluation"] == 0
    assert page["areal_process_deaths_total", "engine"] == 1
    assert page["areal_process_restarts_total", "rank"] == 0
    assert page["areal_weight_update_seconds_total", "stage"] == 1.5
    assert page["areal_cpu_seconds_total", "engine"] == 6
    assert page["areal_cpu_seconds_total", "driver"] != 1  # this process's own


def test_no_counter_goes_back_when_the_run_goes_on_here_or_in_another_process(
    directory: RunDirectory, cluster: Any
) -> None:
    def counters(page: Page) -> Page:
        return {series: value for series, value in page.items() if series[0].endswith("_total")}

    with open_exporter(directory) as exporter:
        with exporter.watching(cluster, fake_fleet()):
            exporter.step(5, {"tokens": 50.0, "train_seconds": 1.0})
        assert not any(series[0] in OF_A_FLEET for series in scrape(exporter)), "there is no fleet meanwhile"
        exporter.restarted("rank")
        exporter.begin(4)  # its newest checkpoint
        with exporter.watching(cluster, fake_fleet(sampled_tokens=10)):
            exporter.step(5, {"tokens": 50.0, "train_seconds": 1.0})
            here = counters(scrape(exporter))
    with open_exporter(directory) as exporter:
        exporter.begin(4)
        resumed = counters(scrape(exporter))
        exporter.step(5, {"tokens": 50.0})
        later = counters(scrape(exporter))
    assert here["areal_sampled_tokens_total",] == 110
    assert here["areal_process_restarts_total", "rank"] == 1
    assert here["areal_process_deaths_total", "engine"] == 1  # the same cluster
    assert here["areal_steps_total",] == 6
    assert resumed.keys() == here.keys()
    assert all(resumed[series] >= value for series, value in here.items())
    assert later["areal_trained_tokens_total",] == 150
    assert later["areal_steps_total",] == 7


@pytest.mark.parametrize("content", ["{", "[1]", '[[["areal_gone_total"], 1.0], [["areal_steps_total", "x"], 2.0]]'])
def test_counters_that_cannot_be_read_begin_at_nothing(directory: RunDirectory, content: str) -> None:
    (directory.path / "counters.json").write_text(content)
    with open_exporter(directory) as exporter:
        exporter.step(1, {})
        assert scrape(exporter)["areal_steps_total",] == 1


def test_the_newest_checkpoint_is_shown(directory: RunDirectory) -> None:
    with open_exporter(directory) as exporter:
        assert ("areal_checkpoint_step",) not in scrape(exporter)
        for step in (20, 40):
            directory.checkpoint(step).mkdir()
        page = scrape(exporter)
    assert page["areal_checkpoint_step",] == 40
    assert page["areal_checkpoint_timestamp_seconds",] == directory.checkpoint(40).stat().st_mtime


def test_a_cluster_that_does_not_answer_leaves_the_last_figures(
    directory: RunDirectory, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(exporter_module, "STATUS_SECONDS", 0.05)
    with open_exporter(directory) as exporter, exporter.watching(cluster, fake_fleet()):
        cluster.hangs = True
        scrape(exporter)
        cluster.hangs = False
        assert scrape(exporter)["areal_cpu_seconds_total", "engine"] == 5
        cluster.hangs = True
        assert scrape(exporter)["areal_cpu_seconds_total", "engine"] == 5


def test_clients_that_never_send_or_never_read_hold_up_nobody(directory: RunDirectory) -> None:
    with open_exporter(directory) as exporter:
        address = httpx.URL(exporter.url)
        silent = [socket.create_connection((address.host, address.port)) for _ in range(20)]
        deaf = [socket.create_connection((address.host, address.port)) for _ in range(20)]
        for each in deaf:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            each.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n" * 50)
        exporter.step(1, {"reward": 1.0})
        assert scrape(exporter)["areal_reward",] == 1
        for each in silent + deaf:
            each.close()


def test_a_port_that_is_taken_is_a_clear_error(directory: RunDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metrics cannot listen on 127.0.0.1:{port}: .*in use; use port 0"):
            open_exporter(directory, port=port)


def test_ports_and_hosts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"port must lie in \[0, 65535\], got 65536; use 0 for a free one, or null"):
        MetricsConfig(port=65536)
    with pytest.raises(ConfigError, match=r"host must be an address, got none; use 127.0.0.1"):
        MetricsConfig(host="")


@pytest.mark.slow
def test_the_exporter_loads_no_torch() -> None:
    program = "import sys, areal.trainer.exporter; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def sft_config(output_dir: Path, model: Path, port: int | None) -> SFTConfig:
    config = SFTConfig(
        experiment_name="sft",
        trial_name="one",
        output_dir=str(output_dir),
        total_train_steps=3,
        train_dataset=DatasetConfig(path="builtin:sums", batch_size=8),
        saver=SaverConfig(freq_steps=2),
        metrics=MetricsConfig(port=port),
    )
    config.actor.path = str(model)
    return config


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_supervised_training_is_shown_and_listens_to_nothing_unless_asked(
    tmp_path: Path, tiny_math: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from areal import SFTTrainer

    with SFTTrainer(sft_config(tmp_path / "off", tiny_math, None)) as trainer:
        trainer.train()
        assert "areal metrics" not in {thread.name for thread in threading.enumerate()}
    assert "/metrics" not in capfd.readouterr().err
    assert not (tmp_path / "off/sft/one/counters.json").exists()
    with SFTTrainer(sft_config(tmp_path / "on", tiny_math, 0)) as trainer:
        trainer.train()
        assert trainer._exporter is not None
        page = scrape(trainer._exporter)
        assert trainer._exporter.url in capfd.readouterr().err
    assert page["areal_step",] == page["areal_steps_total",] == page["areal_checkpoint_step",] == 3
    assert page["areal_computed_tokens_total",] > 0
    assert page["areal_trainer_seconds_total", "computing"] > 0
    assert page["areal_loss",] > 0
    assert page["areal_run_info", "sft", "one", "sft", str(tiny_math), "", "", "local"] == 1
    assert "areal metrics" not in {thread.name for thread in threading.enumerate()}
