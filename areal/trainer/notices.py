"""What a run says at its start and at its end: where it is, how to look at it, what came out."""

from pathlib import Path
from typing import Any

STOPPING = "stopping after the current step; press Ctrl-C again to stop at once"


def hello(run: Path, step: int, *, served: bool = False) -> list[str]:
    """Where the run is and how to look at it, a line each. `served`: a viewer is, whose address is said elsewhere."""
    resumed = f" (resuming after step {step})" if step else ""
    return [f"run         {run}{resumed}", *([] if served else [f"look at it  areal view {run}"])]


def stopped(run: Path, step: int, total_steps: int) -> str:
    when = f"after step {step} of {total_steps}" if step else "before the first step"
    return f"stopped {when}; everything is saved in {run}\nto go on, give the same command with trial_name={run.name}"


def results(summary: dict[str, Any]) -> list[str]:
    """What a PPO run cost, a line each."""
    return [
        f"{summary['calls']:,} model calls, {summary['calls_per_second']:.0f} per second",
        *_pauses(summary["weight_pause_seconds"]),
        _logprobs(summary["max_logprob_difference"]),
        *_dropped(summary),
        *summary.get("stalls", []),
    ]


def verdicts(summary: dict[str, Any]) -> list[str]:
    """How well it went, a line each."""
    return [summary[name] for name in ("greedy_verdict", "verdict") if name in summary]


def _logprobs(difference: float | None) -> str:
    if difference is None:
        return "engine and trainer log-probs were not compared: no token of the weights in training had an advantage"
    return f"log-probs of the engine and of the trainer differ by at most {difference:.0e}"


def _dropped(summary: dict[str, Any]) -> list[str]:
    """Whether what was dropped for its age is like what was trained."""
    dropped, trained = summary.get("dropped", {}), summary.get("trained", {})
    if not dropped.get("groups"):
        return []
    share = dropped["groups"] / (dropped["groups"] + trained["groups"])
    compared = ", ".join(
        f"{name} {format(dropped[key], form)} against {format(trained[key], form)}"
        for name, key, form in (
            ("seconds", "episode_seconds", ".2g"),
            ("tokens", "episode_tokens", ".0f"),
            ("reward", "episode_reward", ".2f"),
        )
    )
    return [
        f"{dropped['groups']:,} groups ({share:.1%}) were dropped as too old; their mean episode against the trained: "
        f"{compared}; rollout.when_stale=wait trains them all"
    ]


def _pauses(seconds: dict[str, float]) -> list[str]:
    if not seconds:
        return []
    return [
        f"new weights held generation up for {1e3 * seconds['median']:.0f} ms (median), "
        f"{1e3 * seconds['max']:.0f} ms at most"
    ]


def places(run: Path, model: Path, curve: Path | None = None) -> list[str]:
    """Where to find what a run leaves in its directory, a line each."""
    return [
        f"model       {model}",
        *([f"curve       {curve}"] if curve else []),
        f"look at it  areal view {run}",
        f"talk to it  areal chat {run}",
    ]
