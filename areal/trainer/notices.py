"""The sentences a run says to its user at its start and at its end."""

from pathlib import Path
from typing import Any

from areal.trainer.threads import ThreadPlan


def hello(run: Path, step: int, threads: ThreadPlan) -> str:
    resumed = f" (resuming after step {step})" if step else ""
    return f"run directory {run}{resumed}\n{threads.reason}"


def stopping() -> str:
    return "stopping after the present step; Ctrl-C again stops at once"


def stopped(run: Path, step: int, total_steps: int) -> str:
    when = f"after step {step} of {total_steps}" if step else "before the first step"
    return f"stopped {when}; everything is saved in {run}\nto go on, give the same command with trial_name={run.name}"


def closing(summary: dict[str, Any], run: Path, model: Path, curve: Path) -> str:
    """What it cost, how well it went, where everything is."""
    cpu = " · ".join(f"{name}: {seconds:.0f} s" for name, seconds in summary["cpu_seconds"].items())
    lines = [
        f"{summary['calls']:,} model calls, {summary['calls_per_second']:.0f} per second · "
        f"engine busy during {summary['overlap']:.0%} of training",
        f"processor time · {cpu}",
        *_pauses(summary["weight_pause_seconds"]),
        f"engine and trainer log-probs differ by at most {summary['max_logprob_difference']:.0e}",
        *summary.get("stalls", []),
        *_greedy(summary["held_out"]),
        *([summary["verdict"]] if "verdict" in summary else []),
        f"curve       {curve}",
        f"run         {run}",
        f"model       {model}",
        f"talk to it  areal chat {model}",
    ]
    return "\n".join(lines)


def _pauses(seconds: dict[str, float]) -> list[str]:
    if not seconds:
        return []
    return [
        f"new weights held generation up for {1e3 * seconds['median']:.0f} ms (median), "
        f"{1e3 * seconds['max']:.0f} ms at most"
    ]


def _greedy(held_out: dict[str, Any]) -> list[str]:
    if "before_greedy" not in held_out or "after_greedy" not in held_out:
        return []
    before, after = held_out["before_greedy"], held_out["after_greedy"]
    return [f"greedy {before['reward']:.2f} → {after['reward']:.2f} on {after['tasks']} held-out tasks"]
