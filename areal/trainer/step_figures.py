"""What is written down about one training step."""

from collections.abc import Mapping, Sequence

import numpy as np

from areal.api.messages import Episode, GroupResult


def step_figures(groups: Sequence[GroupResult], version: int, policy: Mapping[str, float]) -> dict[str, float]:
    """Figures of a batch that was consumed at `version`, beside those of the update itself."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = np.array([episode.reward for episode in episodes])
    lags = np.array([version - _oldest(episode) for episode in episodes])
    figures = {
        "reward": float(rewards.mean()),
        "staleness": float(lags.mean()),
        "staleness_max": float(lags.max()),
        "episodes": float(len(episodes)),
        "calls": float(sum(episode.calls for episode in episodes)),
        "tokens": float(sum(int(row.loss_mask.sum()) for episode in episodes for row in episode.rows)),
        "episode_seconds": float(np.mean([episode.seconds for episode in episodes])),
        "truncated": float(np.mean([episode.rows[-1].truncated for episode in episodes])),
    }
    return {**figures, **policy, **_recorded(episodes)}


def _oldest(episode: Episode) -> int:
    return min(int(row.versions[row.loss_mask].min()) for row in episode.rows if row.loss_mask.any())


def _recorded(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means of what user code recorded through the stats tracker."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.stats.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(each)) for name, each in values.items()}
