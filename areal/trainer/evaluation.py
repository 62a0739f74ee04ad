"""How good a policy is on held-out tasks, and how sure that is: rates, 95 % intervals, the difference to before.

Every task is one observation, however many episodes it has: those of one task are not independent. A success rate has a
Wilson interval and counts a rejected episode as a failure. Any other reward has a bootstrap interval over tasks and
leaves rejected episodes out, because their reward is unknown. Before and after are compared task by task: for
success rates by Newcombe's paired interval from the two Wilson intervals, otherwise by the bootstrap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from areal.api.messages import GroupResult

Z = 1.959964
"""A normal variable is within this many deviations of its mean 95 % of the time."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Evaluation:
    reward: float
    """Mean over tasks of the mean over their episodes (avg@n). A rejected episode counts as 0 in a success rate and is
    left out otherwise."""
    tasks: int
    rejected: int
    """Episodes."""
    is_success: bool
    """Every reward was 0 or 1, so their mean is a success rate."""
    episodes: int = 0
    """With the rejected ones."""
    interval: list[float] = field(default_factory=list)
    """Of 95 %: low, high; empty = not known, or nothing was accepted."""
    pass_at_k: list[float] = field(default_factory=list)
    """Of a success rate with several episodes per task, for k = 1, 2, …: at least one of k episodes succeeds."""
    task_rewards: list[float | None] = field(default_factory=list)
    """The mean of each task, in the order of the dataset; None = nothing of it counts."""

    @classmethod
    def of(cls, results: Sequence[GroupResult]) -> "Evaluation":
        """A result per task."""
        rewards = [[episode.reward for episode in result.episodes] for result in results]
        rejected = [len(result.rejections) for result in results]
        is_success = all(reward in (0.0, 1.0) for each in rewards for reward in each)
        if is_success:
            rewards = [each + [0.0] * lost for each, lost in zip(rewards, rejected, strict=True)]
        means = [sum(each) / len(each) if each else None for each in rewards]
        known = [mean for mean in means if mean is not None]
        reward = sum(known) / len(known) if known else 0.0
        return cls(
            reward=reward,
            tasks=len(results),
            rejected=sum(rejected),
            is_success=is_success,
            episodes=sum(len(result.episodes) + len(result.rejections) for result in results),
            interval=list(wilson(reward, len(known)) if is_success else bootstrap(known)) if known else [],
            pass_at_k=_pass_at_k(rewards) if is_success else [],
            task_rewards=means,
        )


def by_task(results: Sequence[GroupResult], tasks: int) -> list[GroupResult]:
    """The results of so many tasks that were run one after the other, several times over, as one for each."""
    return [_merged(results[place::tasks]) for place in range(tasks)]


def _merged(results: Sequence[GroupResult]) -> GroupResult:
    return GroupResult(
        results[0].task_id,
        [episode for result in results for episode in result.episodes],
        [rejection for result in results for rejection in result.rejections],
        {},
    )


@dataclass(frozen=True)
class Difference:
    """What training changed, or what another model does otherwise, task by task."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, before: Evaluation, after: Evaluation) -> "Difference | None":
        """None if the two cannot be paired: of different tasks, or nothing counts in both."""
        if len(before.task_rewards) != len(after.task_rewards):
            return None
        both = zip(before.task_rewards, after.task_rewards, strict=True)
        pairs = [(first, second) for first, second in both if first is not None and second is not None]
        if not pairs:
            return None
        old, new = np.array(pairs).T
        if before.is_success and after.is_success:
            low, high = paired_wilson(old, new)
        else:
            low, high = bootstrap((new - old).tolist())
        return cls(float((new - old).mean()), low, high)


def wilson(rate: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a rate that was observed in `count` independent trials."""
    square = Z * Z
    middle = (rate + square / (2 * count)) / (1 + square / count)
    half = Z * math.sqrt(rate * (1 - rate) / count + square / (4 * count * count)) / (1 + square / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_wilson(before: Sequence[float] | np.ndarray, after: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the difference of two rates on the same tasks (Newcombe 1998, method 10)."""
    old, new = np.asarray(before, float), np.asarray(after, float)
    count, first, second = len(old), float(old.mean()), float(new.mean())
    (low_1, high_1), (low_2, high_2) = wilson(first, count), wilson(second, count)
    covariance = float((old * new).mean()) - first * second
    spread = float(old.std() * new.std())
    if covariance > 0:  # the correction for continuity keeps few tasks from looking perfectly correlated
        covariance = max(covariance - 1 / (2 * count), 0.0)
    phi = covariance / spread if spread else 0.0
    below, above = second - low_2, high_2 - second
    below_1, above_1 = first - low_1, high_1 - first
    down = math.sqrt(max(0.0, below**2 - 2 * phi * below * above_1 + above_1**2))
    up = math.sqrt(max(0.0, above**2 - 2 * phi * above * below_1 + below_1**2))
    return second - first - down, second - first + up


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean, from the means of resamples; the same for the same values."""
    array, draw = np.array(values), np.random.default_rng(0)
    means = [array[draw.integers(0, len(array), len(array))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def pass_at_k(episodes: int, successes: int, k: int) -> float:
    """Without bias, how likely at least one of `k` of these episodes, drawn at random, is a success."""
    return 1.0 - math.comb(episodes - successes, k) / math.comb(episodes, k)


def _pass_at_k(rewards: Sequence[Sequence[float]]) -> list[float]:
    fewest = min((len(each) for each in rewards), default=0)
    if fewest < 2:
        return []
    of_tasks = [(len(each), round(sum(each))) for each in rewards]
    return [sum(pass_at_k(n, right, k) for n, right in of_tasks) / len(of_tasks) for k in range(1, fewest + 1)]


def verdict(before: Evaluation, after: Evaluation, seconds: float) -> str:
    """`held-out success 0.41 → 0.93 in 58 s (95 %: 0.37–0.45 → 0.91–0.95, difference +0.48 to +0.56)`"""
    what = "success" if before.is_success and after.is_success else "reward"
    notes = [*_sureness(before, after), *_of_samples(before, after)]
    if after.rejected:
        counted = ", counted as failures" if after.is_success else ""
        notes.append(f"{after.rejected} of {after.episodes} episodes rejected{counted}")
    ending = f" ({'; '.join(notes)})" if notes else ""
    return f"held-out {what} {before.reward:.2f} → {after.reward:.2f} in {seconds:.0f} s{ending}"


def greedy_verdict(before: Evaluation, after: Evaluation) -> str:
    """`greedy 0.61 → 0.97 on 512 held-out tasks (95 %: …)`"""
    notes = "".join(f" ({each})" for each in _sureness(before, after))
    return f"greedy {before.reward:.2f} → {after.reward:.2f} on {after.tasks} held-out tasks{notes}"


def _sureness(before: Evaluation, after: Evaluation) -> list[str]:
    if not before.interval or not after.interval:
        return []
    difference = Difference.of(before, after)
    change = f", difference {difference.low:+.2f} to {difference.high:+.2f}" if difference else ""
    return [f"95 %: {_range(before)} → {_range(after)}{change}"]


def _of_samples(before: Evaluation, after: Evaluation) -> list[str]:
    count = min(len(before.pass_at_k), len(after.pass_at_k))
    if not count:
        return []
    return [f"avg@{count}, pass@{count} {before.pass_at_k[count - 1]:.2f} → {after.pass_at_k[count - 1]:.2f}"]


def _range(evaluation: Evaluation) -> str:
    low, high = evaluation.interval
    return f"{low:.2f}–{high:.2f}"
