"""What each tracking library is told: a run, its figures, tables, and its end. Loaded when a run names one.

All calls for a run come from one thread, which is not the main one.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TABLE = "rollouts"
MOST_PARAMETER = 500
"""Characters of a setting's value that MLflow keeps, by the smallest of its stores."""


@dataclass(frozen=True)
class TrackedRun:
    project: str
    name: str
    offline: bool
    """Nothing leaves this machine."""
    directory: Path
    """For what the libraries write."""
    config: Mapping[str, Any]
    """Settings by their dotted names."""


class RunTracker(Protocol):
    id: str
    """The library's name for the run, by which it goes on later."""

    def figures(self, step: int, values: Mapping[str, float]) -> None: ...

    def table(self, step: int, columns: list[str], rows: list[list[Any]]) -> None: ...

    def finish(self) -> None: ...


class Wandb:
    def __init__(self, run: TrackedRun, known: str | None) -> None:
        import wandb

        self._wandb = wandb
        self.id = known or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            mode="offline" if run.offline else "online",
            dir=str(run.directory),
            config=dict(run.config),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Its own steps only go up, and ours may be taken again.
        self._run.define_metric("*", step_metric="step")

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def table(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self._run.log({TABLE: self._wandb.Table(columns=columns, data=rows), "step": step})

    def finish(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, run: TrackedRun, known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(f"sqlite:///{run.directory.absolute() / 'mlflow.db'}" if run.offline else None)
        if known is None:
            place = f"file://{run.directory.absolute() / 'mlartifacts'}" if run.offline else None
            found = self._client.get_experiment_by_name(run.project)
            experiment = found.experiment_id if found else self._client.create_experiment(run.project, place)
            known = self._client.create_run(experiment, run_name=run.name).info.run_id
            texts = {name: str(value)[:MOST_PARAMETER] for name, value in run.config.items()}
            self._client.log_batch(known, params=[Param(name, text) for name, text in texts.items()])
        else:
            self._client.set_terminated(known, "RUNNING")
        self.id: str = known

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self.id, metrics=[self._metric(name, value, now, step) for name, value in values.items()]
        )

    def table(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        text = json.dumps({"columns": columns, "data": rows})
        self._client.log_text(self.id, text, f"{TABLE}/step-{step:06d}.json")

    def finish(self) -> None:
        self._client.set_terminated(self.id)


class Trackio:
    """It is local unless the environment names a space; `offline` changes nothing."""

    def __init__(self, run: TrackedRun, known: str | None) -> None:
        import trackio

        self._trackio = trackio
        self.id = known or f"{run.name}-{uuid.uuid4().hex[:6]}"
        self._run = trackio.init(
            project=run.project,
            name=self.id,
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self._run.log({TABLE: self._trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self) -> None:
        self._run.finish()


class Swanlab:
    def __init__(self, run: TrackedRun, known: str | None) -> None:
        import swanlab

        self._text = swanlab.Text
        self.id = known or uuid.uuid4().hex[:21]
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            mode="offline" if run.offline else "online",
            log_dir=str(run.directory / "swanlog"),
            config=dict(run.config),
        )

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        """It shows texts, one for each row."""
        texts = ["\n".join(f"{name}: {value}" for name, value in zip(columns, row, strict=True)) for row in rows]
        self._run.log({TABLE: [self._text(text) for text in texts]}, step=step)

    def finish(self) -> None:
        self._run.finish()


KINDS: dict[str, Callable[[TrackedRun, str | None], RunTracker]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "swanlab": Swanlab,
}
