"""The numbers of a run, one row per step: RUN/metrics.jsonl for programs, RUN/tensorboard for eyes."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal.trainer.step_lines import StepLines, read_lines

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        """`start_step` is the first step that will be written; older rows of it and of later steps are dropped."""
        # Imported here because it takes a tenth of a second and only a run that is being trained needs it.
        from tensorboardX import SummaryWriter

        self._lines = StepLines(Path(run_dir) / FILE_NAME, start_step)
        self._board: Any = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=start_step or None)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a row. A value that is not finite becomes null in the file: JSON has no word for it."""
        finite = {name: _finite(value) for name, value in values.items() if name != "step"}
        self._lines.append({"step": step, **finite})
        for name, value in finite.items():
            if value is not None:
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows written so far, oldest first; none if the run has not begun."""
    path = Path(run_dir) / FILE_NAME
    return list(read_lines(path)) if path.exists() else []


def _finite(value: float | None) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None
