"""What a run shows to Prometheus: `GET /metrics` on the driver, if `metrics.port` is set.

`METRICS` is the list of what is shown. Figures of steps are told to the exporter (`step`); everything else is asked for
when somebody looks: engines and episodes on the cluster's event loop, checkpoints in the run's directory.

It has an event loop of its own, in a thread of its own. The trainer tells it things and never waits for it; whoever
reads slowly, or not at all, holds up neither the trainer nor the episodes.

Invariant: a counter never goes back. Totals are written down before they are shown, so a run that is resumed, in this
process or another, goes on from what was last seen. Work that is done again after a resume counts again.
"""

import asyncio
import json
import math
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal import __version__
from areal.api.errors import RejectReason
from areal.api.messages import ENGINE_ROLE, RANK_ROLE, WORKER_ROLE
from areal.config.experiment import ExperimentConfig, PPOConfig
from areal.config.parallel import Ranks
from areal.infra.app_server import AppServer, listen
from areal.infra.loop_thread import LoopThread
from areal.trainer.run_directory import RunDirectory, write_atomically
from areal.utils.closing import Closing
from areal.utils.logging import getLogger

if TYPE_CHECKING:  # these load torch
    from areal.trainer.cluster import Cluster
    from areal.trainer.fleet import Fleet, FleetStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTERS_FILE = "counters.json"
DRIVER = "driver"
HEAD_SECONDS = 10.0
"""For the head of a request."""
ASK_SECONDS = 1.0
"""For the answer of each process; one that is too busy keeps its last figure."""
STATUS_SECONDS = 3.0
"""For the answer of the cluster's event loop; after that the page has its last figures."""
FRESH_SECONDS = 1.0
"""Processes are asked no more often than this, however many look."""

logger = getLogger("metrics")


@dataclass(frozen=True)
class Metric:
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "areal_build_info": Metric("gauge", "1; what runs.", ("version", "python", "torch")),
    "areal_run_info": Metric(
        "gauge",
        "1; what is trained, and on what.",
        ("experiment", "trial", "trainer", "model", "ranks", "engine", "scheduler"),
    ),
    "process_start_time_seconds": Metric("gauge", "When the driver started, in seconds since 1970."),
    "areal_step": Metric("gauge", "Steps taken, in earlier sessions too."),
    "areal_target_steps": Metric("gauge", "Steps after which the run is finished."),
    "areal_last_step_timestamp_seconds": Metric("gauge", "When the latest step ended, in seconds since 1970."),
    "areal_steps_total": Metric("counter", "Steps taken; those that were taken again count again."),
    "areal_weight_version": Metric("gauge", "Version of the weights that the engines were given last."),
    "areal_reward": Metric("gauge", "Mean reward of the latest step's episodes."),
    "areal_held_out_reward": Metric("gauge", "Mean reward of the latest evaluation.", ("decoding",)),
    "areal_staleness_mean": Metric("gauge", "Versions between an episode's oldest token and the weights it trains."),
    "areal_staleness_max": Metric("gauge", "The most of these in the latest step."),
    "areal_loss": Metric("gauge", "Loss of the latest step."),
    "areal_gradient_norm": Metric("gauge", "Norm of its gradient, before clipping."),
    "areal_learning_rate": Metric("gauge", "Learning rate of the latest step."),
    "areal_logprob_difference_max": Metric("gauge", "Largest between the engine's log-probs and the trainer's."),
    "areal_truncated_ratio": Metric("gauge", "Share of the latest step's episodes that were cut off."),
    "areal_episode_seconds": Metric("gauge", "Mean time of the latest step's episodes."),
    "areal_figure": Metric("gauge", "Every other figure of metrics.jsonl, of the latest step that had it.", ("name",)),
    "areal_skipped_updates_total": Metric("counter", "Updates left out because they were not finite."),
    "areal_trained_tokens_total": Metric("counter", "Sampled tokens that were trained."),
    "areal_trained_episodes_total": Metric("counter", "Episodes that were trained."),
    "areal_trained_calls_total": Metric("counter", "Model calls of these episodes."),
    "areal_computed_tokens_total": Metric("counter", "Tokens of the trainer's forward passes; common prefixes once."),
    "areal_sampled_tokens_total": Metric("counter", "Sampled tokens of finished episodes, trained or not."),
    "areal_trainer_seconds_total": Metric(
        "counter", "Of the trainer: waiting for episodes, computing, publishing weights.", ("activity",)
    ),
    "areal_episodes": Metric("gauge", "Episodes running, ready to be trained, or of an evaluation.", ("state",)),
    "areal_rejected_episodes_total": Metric("counter", "Episodes that yield no sample.", ("reason", "purpose")),
    "areal_engines": Metric("gauge", "Engines by what they are doing.", ("state",)),
    "areal_rollout_workers": Metric("gauge", "Rollout workers that are there, or being started again.", ("state",)),
    "areal_ranks": Metric("gauge", "Ranks that train the model; 0 = the driver does."),
    "areal_process_deaths_total": Metric("counter", "Processes that ended and should not have.", ("role",)),
    "areal_process_restarts_total": Metric("counter", "Those that were started again.", ("role",)),
    "areal_weight_updates_total": Metric("counter", "Versions that the engines were given."),
    "areal_weight_update_seconds_total": Metric(
        "counter", "Until the engines had checked new weights (stage), and until they used them (swap).", ("phase",)
    ),
    "areal_checkpoint_step": Metric("gauge", "Step of the newest checkpoint."),
    "areal_checkpoint_timestamp_seconds": Metric("gauge", "When it was written, in seconds since 1970."),
    "areal_cpu_seconds_total": Metric("counter", "Processor time of each process.", ("process",)),
}
"""By name. A name and its labels are an interface: dashboards and alerts of other people use them."""

LATEST = {
    "reward": ("areal_reward",),
    "eval_reward": ("areal_held_out_reward", "sampled"),
    "eval_greedy_reward": ("areal_held_out_reward", "greedy"),
    "staleness": ("areal_staleness_mean",),
    "staleness_max": ("areal_staleness_max",),
    "loss": ("areal_loss",),
    "grad_norm": ("areal_gradient_norm",),
    "lr": ("areal_learning_rate",),
    "max_logprob_difference": ("areal_logprob_difference_max",),
    "truncated": ("areal_truncated_ratio",),
    "episode_seconds": ("areal_episode_seconds",),
}
"""Figures of a step whose latest value is shown: the metric and its labels."""

SUMMED = {
    "tokens": ("areal_trained_tokens_total",),
    "episodes": ("areal_trained_episodes_total",),
    "calls": ("areal_trained_calls_total",),
    "forward_tokens": ("areal_computed_tokens_total",),
    "skipped_updates": ("areal_skipped_updates_total",),
    "wait_seconds": ("areal_trainer_seconds_total", "waiting"),
    "train_seconds": ("areal_trainer_seconds_total", "computing"),
    "publish_seconds": ("areal_trainer_seconds_total", "publishing"),
}
"""Those that are added up."""

OF_A_FLEET = ("areal_engines", "areal_rollout_workers", "areal_episodes")
"""What is shown only while there is one."""

Series = tuple[str, ...]
"""A metric's name and the values of its labels."""


class Samples:
    """The value of every series, and the text that Prometheus reads."""

    def __init__(self) -> None:
        self._values: dict[Series, float] = {}
        self._seen: WeakKeyDictionary[object, dict[Series, float]] = WeakKeyDictionary()
        """The totals that each source had when it was last asked."""

    def set(self, value: float, name: str, *labels: str) -> None:
        self._values[self._series(name, labels, "gauge")] = value

    def add(self, amount: float, name: str, *labels: str) -> None:
        series = self._series(name, labels, "counter")
        self._values[series] = self._values.get(series, 0.0) + amount

    def follow(self, source: object, total: float, name: str, *labels: str) -> None:
        """Add what `total` has grown by since `source` had it last, at first since 0."""
        seen = self._seen.setdefault(source, {})
        self.add(max(0.0, total - seen.get((name, *labels), 0.0)), name, *labels)
        seen[name, *labels] = total

    def forget(self, *names: str) -> None:
        """What these metrics tell of is gone."""
        self._values = {series: value for series, value in self._values.items() if series[0] not in names}

    @property
    def totals(self) -> dict[Series, float]:
        return {series: value for series, value in self._values.items() if METRICS[series[0]].kind == "counter"}

    def text(self) -> str:
        by_name: dict[str, list[str]] = {}
        for (name, *labels), value in self._values.items():
            by_name.setdefault(name, []).append(f"{name}{_labels(METRICS[name].labels, labels)} {_number(value)}\n")
        return "".join(
            f"# HELP {name} {_escape(metric.help)}\n# TYPE {name} {metric.kind}\n{''.join(by_name[name])}"
            for name, metric in METRICS.items()
            if name in by_name
        )

    def _series(self, name: str, labels: tuple[str, ...], kind: str) -> Series:
        metric = METRICS[name]
        assert (metric.kind, len(metric.labels)) == (kind, len(labels)), f"{name} is a {metric}"
        return (name, *labels)


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    quoted = (
        '{}="{}"'.format(name, _escape(value).replace('"', r"\"")) for name, value in zip(names, values, strict=True)
    )
    return f"{{{','.join(quoted)}}}" if names else ""


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


class Exporter(Closing):
    def __init__(self, config: ExperimentConfig, directory: RunDirectory, total_steps: int) -> None:
        """Listen at once. Raises ConfigError if that address cannot be had."""
        assert config.metrics.port is not None, "metrics.port is what turns it on"
        listening = listen(config.metrics.host, config.metrics.port, "metrics")
        self.url = _url(listening)
        self._directory = directory
        self._step = 0
        self._samples = Samples()
        self._totals = _TotalsFile(directory.path / COUNTERS_FILE)
        for series, value in self._totals.read().items():
            self._samples.add(value, *series)
        _describe(self._samples, config, directory.path.name)
        self._samples.set(total_steps, "areal_target_steps")
        self._watched: tuple[Cluster, Fleet | None] | None = None
        self._asked_at = -math.inf
        self._lock = asyncio.Lock()
        """Held by whoever brings the samples up to date."""
        self._loop = LoopThread("areal metrics")
        app = Starlette(routes=[Route("/metrics", self._answer)])
        self._server = AppServer(app, listening, head_seconds=HEAD_SECONDS, name="metrics")
        self._loop.run(self._server.start())

    def begin(self, step: int) -> None:
        """So many steps have been taken: a run begins, or goes on from a checkpoint."""
        self._loop.call(self._begin, step)

    def step(self, step: int, figures: Mapping[str, float | None]) -> None:
        """The figures of a step, or of an evaluation after it."""
        self._loop.call(self._take, step, dict(figures))

    def restarted(self, role: str) -> None:
        """The processes of a role died together, and the run goes on with new ones."""
        self._loop.call(self._samples.add, 1, "areal_process_restarts_total", role)

    @contextmanager
    def watching(self, cluster: "Cluster", fleet: "Fleet | None" = None) -> Iterator[None]:
        """Ask these when somebody looks, until the end of the block."""
        before = self._watched
        self._loop.run(self._watch(cluster, fleet))
        try:
            yield
        finally:
            self._loop.run(self._unwatch(before))

    def close(self) -> None:
        self._loop.run(self._server.stop())
        self._loop.close()

    async def _answer(self, request: Request) -> Response:
        async with self._lock:
            await self._refresh()
            self._totals.write(self._samples.totals)
            return Response(self._samples.text(), headers={"content-type": CONTENT_TYPE})

    def _begin(self, step: int) -> None:
        self._step = step
        self._samples.set(step, "areal_step")

    def _take(self, step: int, figures: dict[str, float | None]) -> None:
        if step > self._step:
            self._samples.add(step - self._step, "areal_steps_total")
            self._samples.set(time.time(), "areal_last_step_timestamp_seconds")
            self._begin(step)
        for name, value in figures.items():
            if value is None or name == "step" or name.partition("/")[0] == "rejected":  # which are counted apart
                continue
            if name in SUMMED:
                self._samples.add(max(0.0, value) if math.isfinite(value) else 0.0, *SUMMED[name])
            else:
                self._samples.set(value, *LATEST.get(name, ("areal_figure", name)))

    async def _watch(self, cluster: "Cluster", fleet: "Fleet | None") -> None:
        async with self._lock:
            self._watched = cluster, fleet

    async def _unwatch(self, before: "tuple[Cluster, Fleet | None] | None") -> None:
        async with self._lock:
            assert self._watched is not None, "it was set by `_watch`"
            await self._ask(*self._watched)
            self._watched = before
            if before is None or before[1] is None:
                self._samples.forget(*OF_A_FLEET)

    async def _refresh(self) -> None:
        with suppress(OSError):  # the run removes old checkpoints
            for newest in self._directory.checkpoints()[-1:]:
                self._samples.set(newest.stat().st_mtime, "areal_checkpoint_timestamp_seconds")
                self._samples.set(int(newest.name.partition("-")[2]), "areal_checkpoint_step")
        self._samples.follow(self, time.process_time(), "areal_cpu_seconds_total", DRIVER)
        if self._watched is not None and time.monotonic() - self._asked_at >= FRESH_SECONDS:
            self._asked_at = time.monotonic()
            await self._ask(*self._watched)

    async def _ask(self, cluster: "Cluster", fleet: "Fleet | None") -> None:
        """Under a deadline: a cluster that ends, or is too busy to answer, leaves the figures as they were."""

        async def ask() -> "tuple[dict[str, float], FleetStatus | None]":
            return await cluster.processes.cpu_seconds(ASK_SECONDS), fleet.status() if fleet is not None else None

        asking = asyncio.wrap_future(cluster.begin(ask()))
        await asyncio.wait({asking}, timeout=STATUS_SECONDS)
        if not asking.done():
            asking.cancel()
        if asking.cancelled():
            return
        if (error := asking.exception()) is not None:
            logger.warning("the processes of the run could not be asked: %r", error)
            return
        cpu_seconds, status = asking.result()
        del cpu_seconds[DRIVER]  # whose time goes on, whatever cluster it has
        for process, seconds in cpu_seconds.items():
            self._samples.follow(cluster, seconds, "areal_cpu_seconds_total", process)
        for role in (ENGINE_ROLE, WORKER_ROLE, RANK_ROLE):
            self._samples.follow(cluster, cluster.processes.deaths[role], "areal_process_deaths_total", role)
            self._samples.follow(cluster, cluster.processes.restarts[role], "areal_process_restarts_total", role)
        if status is not None:
            self._show(fleet, status)

    def _show(self, fleet: object, status: "FleetStatus") -> None:
        samples = self._samples
        for state, count in status.engines.items():
            samples.set(count, "areal_engines", state)
        for state, count in status.workers.items():
            samples.set(count, "areal_rollout_workers", state)
        for state, count in status.episodes.items():
            samples.set(count, "areal_episodes", state)
        for purpose, rejected in status.rejected.items():
            for reason in RejectReason:
                samples.follow(fleet, rejected.get(reason, 0), "areal_rejected_episodes_total", reason, purpose)
        if status.version is not None:
            samples.set(status.version, "areal_weight_version")
        samples.follow(fleet, status.sampled_tokens, "areal_sampled_tokens_total")
        samples.follow(fleet, status.weight_updates, "areal_weight_updates_total")
        samples.follow(fleet, status.staging_seconds, "areal_weight_update_seconds_total", "stage")
        samples.follow(fleet, status.swapping_seconds, "areal_weight_update_seconds_total", "swap")


def _describe(samples: Samples, config: ExperimentConfig, trial: str) -> None:
    """What does not change while a run lasts."""
    samples.set(1, "areal_build_info", __version__, platform.python_version(), version("torch"))
    is_ppo = isinstance(config, PPOConfig)
    samples.set(
        1,
        "areal_run_info",
        config.experiment_name,
        trial,
        "ppo" if is_ppo else "sft",
        config.actor.path,
        config.actor.backend,
        config.rollout.backend if isinstance(config, PPOConfig) else "",
        config.scheduler.type,
    )
    samples.set(Ranks.parse(config.actor.backend).count if config.actor.backend else 0, "areal_ranks")
    samples.set(_started_at(), "process_start_time_seconds")


def _started_at() -> float:
    """When this process was started, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _url(listening: socket.socket) -> str:
    """Where it is read; one that listens everywhere has the name of this machine."""
    host, port = listening.getsockname()[:2]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/metrics"


class _TotalsFile:
    """The counters that were shown last, in the run's directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def read(self) -> dict[Series, float]:
        if not self._path.exists():
            return {}
        try:
            rows: list[Any] = json.loads(self._path.read_text(encoding="utf-8"))
            totals = {tuple(map(str, series)): float(value) for series, value in rows if series}
        except (OSError, ValueError, TypeError):
            logger.warning("%s is damaged; counters of /metrics begin at 0 again", self._path)
            return {}
        known = {name: len(metric.labels) for name, metric in METRICS.items() if metric.kind == "counter"}
        return {series: value for series, value in totals.items() if known.get(series[0]) == len(series) - 1}

    def write(self, totals: Mapping[Series, float]) -> None:
        try:
            write_atomically(self._path, json.dumps([[series, value] for series, value in totals.items()]) + "\n")
        except OSError as error:  # the run itself may be able to go on
            if not self._failed:
                logger.warning("%s cannot be written, so counters go back on a resume: %s", self._path, error)
            self._failed = True
