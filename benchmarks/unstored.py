"""The command line of areal for a run whose store keeps steps and no episodes: `python -m benchmarks.unstored train`.

Such a run loses what a kill interrupts, and cannot be replayed. It is what the store's cost is measured against.
"""

import sys
from dataclasses import replace
from unittest.mock import patch

from areal.api.messages import GroupResult, Rejection
from areal.cli.main import main
from areal.store.records import StepRecord
from areal.store.writer import StoreWriter


class StepsOnly(StoreWriter):
    def started(self, task_id: int, version: int, task: object) -> None:
        pass

    def ready(self, result: GroupResult) -> None:
        pass

    def rejected(self, result: GroupResult, why: Rejection) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        super().step(replace(record, batch=(), trained={}))


if __name__ == "__main__":
    with patch("areal.trainer.run.StoreWriter", StepsOnly):
        sys.exit(main())
