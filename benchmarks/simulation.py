"""Does `areal simulate` predict a run? One with η = 0 is recorded, one with η = 2 predicted and then made five times.

The agent waits for a tool whose latency is lognormal (mean 0.5 s, sigma 1.0); everything else is real. The prediction
is compared with the median of the real runs. Also reported: how long the prediction took.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.simulation.scenario import Scenario, predict
from areal.simulation.trace import record
from benchmarks.async_vs_sync import EXAMPLE, HEAD_START
from benchmarks.report import Aim, main

BATCH, SAMPLES, CONCURRENT, STEPS, WORKERS, CORES = 8, 4, 64, 40, 2, 2
REPEATS = 5


def train(place: Path, name: str, eta: int) -> tuple[Path, float]:
    """A run's directory, and its seconds per step after the head start."""
    from areal import PPOTrainer
    from areal.trainer.logs import read_metrics

    words = [
        f"--config={EXAMPLE}",
        f"output_dir={place}",
        f"trial_name={name}",
        f"total_train_steps={STEPS}",
        f"train_dataset.batch_size={BATCH}",
        f"gconfig.n_samples={SAMPLES}",
        f"rollout.max_concurrent_rollouts={CONCURRENT}",
        f"rollout.max_head_offpolicyness={eta}",
        f"rollout.num_workers={WORKERS}",
        "evaluator.freq_steps=null",
        "valid_dataset.path=",
    ]
    config, _ = load_expr_config(words, GRPOConfig)
    with PPOTrainer(config) as trainer:
        result = trainer.train(workflow="benchmarks.async_vs_sync.LognormalToolAgent")
    steps = [row["step_seconds"] for row in read_metrics(result.run_dir) if "step_seconds" in row][HEAD_START:]
    return result.run_dir, sum(steps) / len(steps)


def run() -> tuple[dict[str, Any], list[Aim]]:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        recorded, synchronous = train(place, "recorded", 0)
        began = time.monotonic()
        trace = record(recorded)
        scenario = Scenario(
            trace,
            workers=WORKERS,
            batch_size=BATCH,
            n_samples=SAMPLES,
            max_concurrent_rollouts=CONCURRENT,
            steps=STEPS * 5,
            cores=CORES,
        )
        predicted = predict(scenario).seconds / scenario.steps
        predicting = time.monotonic() - began
        real = [train(place, f"real{number}", 2)[1] for number in range(REPEATS)]
    median = statistics.median(real)
    print(f"predicted {predicted:.3f} s per step, real {[round(each, 3) for each in real]}", file=sys.stderr)
    figures = {
        "synchronous_step_seconds": synchronous,
        "predicted_step_seconds": predicted,
        "real_step_seconds": real,
        "median": median,
        "prediction_seconds": predicting,
        "engine": vars(trace.engine),
        "client": vars(trace.client),
        "trainer": vars(trace.trainer),
    }
    return figures, [Aim.at_most("error of the prediction against the median of 5", abs(predicted / median - 1), 0.2)]


if __name__ == "__main__":
    main(__doc__ or "", run)
