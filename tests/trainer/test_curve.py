"""The reward curve is drawn from whatever rows a run has."""

from pathlib import Path
from typing import Any

import pytest

from areal.trainer.curve import draw_reward_curve, points, running_mean

FULL = [
    {"step": step, "reward": step / 10, "staleness": 1.0, "tokens_per_second": 900.0, "eval_reward": None}
    for step in range(10)
]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "eval_reward": 0.3, "eval_greedy_reward": 0.6}],
        [{"step": 0, "reward": -3.0}, {"step": 1, "reward": None}],
        [{"step": 0, "reward": "0.5", "staleness": [1]}],
        [*FULL, {"step": 10, "reward": 1.0, "eval_reward": 0.9}],
    ],
    ids=["empty", "evaluation only", "gaps and negative rewards", "no numbers", "whole run"],
)
def test_any_rows_can_be_drawn(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    draw_reward_curve(rows, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_running_mean_covers_its_window_and_less_at_the_start() -> None:
    assert running_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert running_mean([1, 3], 1) == [1, 3]


def test_points_leave_out_rows_without_the_value() -> None:
    assert points([{"step": 1}, {"step": 2, "x": 0.0}, {"step": 3, "x": None}], "x") == ([2], [0.0])
