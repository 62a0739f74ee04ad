"""How much faster is training while episodes run than after them? The same steps with η = 0, 2 and 4.

Compute-bound: RLVRWorkflow on the built-in model, one thread per process, compared with the ceiling that the split
between generating and training at η = 0 allows: (generate + train) / the longer of both. Wait-bound: an OpenAI-SDK
agent whose tool waits are lognormal (mean 0.5 s, sigma 1.0; the wait is simulated, everything else is real), 64
episodes at once, 32 per step. Every run ends with the same held-out evaluation: speed must not cost reward.
"""

import asyncio
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.workflow.openai.math_agent import MathAgent
from benchmarks.report import Aim, main

EXAMPLE = Path(__file__).parent.parent / "examples" / "agent_workflow" / "config.yaml"
ETAS = (0, 2, 4)
WAIT_MEAN_SECONDS, WAIT_SIGMA = 0.5, 1.0
STEPS = {"compute": 80, "wait": 40}
HEAD_START = 6
"""First steps, which are not counted: their episodes began before the first of them."""
PROBLEMS = 2000
"""Held-out; with so many, the difference of two success rates has a standard deviation of 0.015."""
SAME_REWARD = 0.06
"""Four standard deviations: runs also differ in what they happen to sample."""


class LognormalToolAgent(MathAgent):
    """Waits for a tool before it asks."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        location = math.log(WAIT_MEAN_SECONDS) - WAIT_SIGMA**2 / 2
        await asyncio.sleep(self._draw.lognormvariate(location, WAIT_SIGMA))
        return await super().run(data, **extra_kwargs)


COMPUTE = (
    "workflow=areal.workflow.RLVRWorkflow",
    "reward_fn=areal.reward.exact_match_reward",
    "scheduler.threads=1",
    "rollout.num_workers=1",
    f"valid_dataset.size={PROBLEMS}",
)
WAIT = (
    "workflow=benchmarks.async_vs_sync.LognormalToolAgent",
    "eval_workflow=areal.workflow.openai.math_agent.MathAgent",
    "train_dataset.batch_size=8",
    "gconfig.n_samples=4",
    "rollout.max_concurrent_rollouts=64",
    f"valid_dataset.size={PROBLEMS}",
)


def train(kind: str, eta: int, *overrides: str) -> dict[str, Any]:
    """One run; seconds are per step, with those spent waiting for episodes."""
    from areal import PPOTrainer
    from areal.trainer.logs import read_metrics

    words = dict(word.split("=", 1) for word in overrides)
    workflow, eval_workflow = words.pop("workflow"), words.pop("eval_workflow", None)
    with tempfile.TemporaryDirectory() as output_dir:
        settings = {
            "output_dir": output_dir,
            "total_train_steps": str(STEPS[kind]),
            "rollout.max_head_offpolicyness": str(eta),
            "evaluator.freq_steps": "null",
            "evaluator.greedy": "false",
            **words,
        }
        config, _ = load_expr_config([f"--config={EXAMPLE}", *(f"{k}={v}" for k, v in settings.items())], GRPOConfig)
        with PPOTrainer(config) as trainer:
            result = trainer.train(workflow=workflow, eval_workflow=eval_workflow)
        steps = [row for row in read_metrics(result.run_dir) if "step_seconds" in row][HEAD_START:]
    summary = result.summary
    seconds, waiting = (sum(row[name] for row in steps) / len(steps) for name in ("step_seconds", "wait_seconds"))
    figures = {
        "step_seconds": seconds,
        "waiting_seconds": waiting,
        "held_out": summary["held_out"]["after"]["reward"],
        "overlap": summary["overlap"],
    }
    print(f"{kind} η={eta}: " + ", ".join(f"{k} {v:.3f}" for k, v in figures.items()), file=sys.stderr)
    return figures


def speedups(runs: dict[int, dict[str, Any]]) -> dict[int, float]:
    return {eta: runs[0]["step_seconds"] / run["step_seconds"] for eta, run in runs.items() if eta}


def reward_aim(kind: str, runs: dict[int, dict[str, Any]]) -> Aim:
    worst = max(runs[0]["held_out"] - run["held_out"] for run in runs.values())
    return Aim.at_most(f"{kind}-bound: held-out success lost against η = 0, the larger of both", worst, SAME_REWARD)


def run() -> tuple[dict[str, Any], list[Aim]]:
    compute = {eta: train("compute", eta, *COMPUTE) for eta in ETAS}
    wait = {eta: train("wait", eta, *WAIT) for eta in ETAS}
    generating = compute[0]["waiting_seconds"]
    training = compute[0]["step_seconds"] - generating
    ceiling = (generating + training) / max(generating, training)
    shares = {eta: speedup / ceiling for eta, speedup in speedups(compute).items()}
    aims = [
        Aim.at_least("compute-bound: the better speed-up over the ceiling of the split", max(shares.values()), 0.75),
        Aim.at_least("wait-bound: the speed-up of η = 2 over η = 0", speedups(wait)[2], 2.8),
        Aim.at_least("wait-bound: the speed-up of η = 4 over η = 0", speedups(wait)[4], 2.8),
        reward_aim("compute", compute),
        reward_aim("wait", wait),
    ]
    figures = {
        "compute": {"runs": compute, "speedup": speedups(compute), "ceiling": ceiling, "share_of_ceiling": shares},
        "wait": {"runs": wait, "speedup": speedups(wait)},
    }
    return figures, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
