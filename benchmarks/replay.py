"""Is an asynchronous run repeatable? 20 runs of a two-turn agent with η = 2, each replayed, altered, replayed again.

Each run has another seed and trains the built-in model for a few steps, engine and trainer side by side. `areal replay`
trains again from its store: every step must lead to weights with the same digest. Then one value of one episode is
changed in a copy of the store, by as little as its type allows; the replay must name the step, the task and the field.
"""

import argparse
import json
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.messages import Row
from areal.store.blobs import columns_of, episodes_of, pack, unpack
from areal.store.schema import STORE_FILE, TRAINED
from areal.trainer.replay import Replay, ReplayOutcome
from benchmarks.report import Aim, main

CONFIG = Path(__file__).parents[1] / "examples/agent_workflow/config.yaml"
STALENESS = 2
RUN_SECONDS = 600.0
SETTINGS = (
    "workflow=areal.workflow.openai.math_agent.MultiTurnMathAgent",
    f"rollout.max_head_offpolicyness={STALENESS}",
    "gconfig.n_samples=4",
    "train_dataset.batch_size=4",
    "valid_dataset.path=",
    "evaluator.freq_steps=null",
    "saver.freq_steps=null",
    "rollout.num_workers=1",
)
FIELDS = ("input_ids", "logprobs", "versions", "returns", "temperatures")


def train(directory: Path, seed: int, steps: int) -> Path:
    """The directory of the run."""
    words = ("--config", str(CONFIG), f"seed={seed}", f"trial_name={seed}", f"total_train_steps={steps}", *SETTINGS)
    command = [sys.executable, "-m", "areal.cli.main", "train", *words]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    return directory / "runs/sort-digits" / str(seed)


def replayed(run: Path, *, until_divergence: bool = False) -> ReplayOutcome:
    """What `areal replay` does, without the start of a process."""
    with Replay(run) as replay:
        outcome = ReplayOutcome(run, replay.span)
        for taken in replay.steps():
            outcome.add(taken)
            if until_divergence and taken.diverges:
                break
    return outcome


def alter(run: Path, draw: random.Random) -> dict[str, Any]:
    """Change the last value of a field of some group that was trained; returns what was changed."""
    name = draw.choice(FIELDS)
    with sqlite3.connect(run / STORE_FILE) as db:
        groups = db.execute("SELECT task_id, step FROM groups WHERE step > 0 AND state = ?", (TRAINED,)).fetchall()
        task_id, step = draw.choice(groups)
        (data,) = db.execute("SELECT data FROM rows WHERE task_id = ?", (task_id,)).fetchone()
        episodes = list(episodes_of(unpack(data), Row).values())
        values = getattr(draw.choice(episodes)[-1], name)
        values[-1] = np.nextafter(values[-1], np.float32(-9)) if values.dtype.kind == "f" else values[-1] + 1
        db.execute("UPDATE rows SET data = ? WHERE task_id = ?", (pack(columns_of(episodes)), task_id))
    return {"step": step, "field": name, "task_id": task_id}


def staleness_and_turns(run: Path) -> tuple[int, float]:
    with sqlite3.connect(run / STORE_FILE) as db:
        oldest, turns = db.execute("SELECT max(staleness), avg(calls) FROM episodes WHERE step > 0").fetchone()
    return oldest, turns


def run_once(directory: Path, seed: int, steps: int) -> dict[str, Any]:
    began = time.monotonic()
    run = train(directory, seed, steps)
    trained = time.monotonic()
    whole = replayed(run)
    seconds = time.monotonic() - trained
    copy = directory / "altered"
    shutil.copytree(run, copy)
    changed = alter(copy, random.Random(seed))
    first = replayed(copy, until_divergence=True).first
    shutil.rmtree(copy)
    named = [] if first is None else [{"step": first.step, **asdict(each)} for each in first.altered]
    oldest, turns = staleness_and_turns(run)
    return {
        "seed": seed,
        "steps": whole.steps,
        "bit_equal": whole.bit_equal,
        "altered": changed,
        "named": named == [changed],
        "staleness_max": oldest,
        "turns": turns,
        "train_seconds": trained - began,
        "replay_seconds": seconds,
    }


def benchmark(count: int, steps: int) -> tuple[dict[str, Any], list[Aim]]:
    runs = []
    with tempfile.TemporaryDirectory(prefix="areal-replay-") as name:
        for seed in range(1, count + 1):
            runs.append(run_once(Path(name), seed, steps))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    equal = sum(each["bit_equal"] == each["steps"] == steps for each in runs)
    named = sum(each["named"] for each in runs)
    figures = {
        "runs": count,
        "steps_each": steps,
        "steps_bit_equal": sum(each["bit_equal"] for each in runs),
        "staleness_max": max(each["staleness_max"] for each in runs),
        "mean_turns": statistics.mean(each["turns"] for each in runs),
        "train_seconds_median": statistics.median(each["train_seconds"] for each in runs),
        "replay_seconds_median": statistics.median(each["replay_seconds"] for each in runs),
        "missed": [each for each in runs if not each["named"] or each["bit_equal"] != steps],
    }
    aims = [
        Aim.at_least(f"runs of {count} that are bit-equal at every step", equal, count),
        Aim.at_least(f"altered stores of {count} whose step and field are named", named, count),
        Aim.at_least("largest staleness of a trained token, in versions", figures["staleness_max"], STALENESS),
    ]
    return figures, aims


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--steps", type=int, default=8, help="of each run")
    chosen, _ = options.parse_known_args()
    main(__doc__ or "", lambda: benchmark(chosen.runs, chosen.steps), options)
