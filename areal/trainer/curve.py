"""Draw a run's reward curve from the rows of its metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]

INK, ACCENT, SECOND, MUTED = "#222222", "#1f6feb", "#d1570b", "#8b949e"
WINDOW_SHARE = 20
"""The running mean covers a twentieth of the run."""

HELD_OUT: dict[str, dict[str, Any]] = {
    "eval_reward": {"label": "held-out, sampled", "color": ACCENT, "marker": "o", "linestyle": "--"},
    # Greedy success is measured at both ends only: a line between the points would claim what was not measured.
    "eval_greedy_reward": {"label": "held-out, greedy", "color": SECOND, "marker": "D", "linestyle": "none"},
}


def draw_reward_curve(rows: Rows, path: str | Path, title: str = "") -> None:
    """Reward per step with its running mean and held-out success above; staleness and tokens/s below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A Figure of its own, not pyplot: pyplot keeps module state and picks a display.
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    _draw_reward(top, rows)
    _draw_pace(bottom, rows)
    top.set_title(title or _verdict(rows), loc="left", fontsize=11, color=INK)
    figure.savefig(path)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the `window - 1` before it, of fewer at the start."""
    means, total = [], 0.0
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        means.append(total / min(i + 1, window))
    return means


def points(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    """Steps and values of the rows that have a number under `key`."""
    pairs = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _verdict(rows: Rows) -> str:
    _, held_out = points(rows, "eval_reward")
    if not held_out:
        return "reward"
    return "held-out reward " + " → ".join(f"{value:.2f}" for value in dict.fromkeys((held_out[0], held_out[-1])))


def _draw_reward(axes: Any, rows: Rows) -> None:
    steps, rewards = points(rows, "reward")
    if steps:
        axes.plot(steps, rewards, color=MUTED, alpha=0.45, linewidth=0.8, label="reward per step")
        smooth = running_mean(rewards, max(1, len(rewards) // WINDOW_SHARE))
        axes.plot(steps, smooth, color=INK, linewidth=1.6, label="running mean")
    for key, style in HELD_OUT.items():
        steps, values = points(rows, key)
        if steps:
            axes.plot(steps, values, markersize=5, linewidth=1, **style)
    if axes.lines:
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    if all(0 <= value <= 1 for line in axes.lines for value in line.get_ydata()):
        axes.set_ylim(0, 1.03)
    axes.set_ylabel("reward")
    _quiet(axes)


def _draw_pace(axes: Any, rows: Rows) -> None:
    steps, staleness = points(rows, "staleness")
    axes.step(steps, staleness, where="mid", color=ACCENT, linewidth=1)
    axes.set_ylabel("staleness", color=ACCENT)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _quiet(axes)
    steps, speed = points(rows, "tokens_per_second")
    if steps:
        right = axes.twinx()
        right.plot(steps, running_mean(speed, max(1, len(speed) // WINDOW_SHARE)), color=SECOND, linewidth=1)
        right.set_ylabel("tokens/s", color=SECOND)
        right.set_ylim(bottom=0)
        right.spines[["top", "left"]].set_visible(False)


def _quiet(axes: Any) -> None:
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
