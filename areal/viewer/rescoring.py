"""What another reward function would have said: `areal rescore RUN --reward module.function`.

The function is called as workflows call it, with `(prompt, completion, prompt_ids, completion_ids, **task)`, for the
last answer of each chosen episode, in the processes that reward functions run in and with their deadline. Old and new
rewards, the advantages that follow from them within each group, and the groups that would gain or lose their signal are
written to RUN/rescored/NAME.json, which the viewer shows. The run itself is not changed.

Advantages here are of whole episodes, by `actor.group_baseline` and `actor.adv_norm` of the run. Dividing by the spread
of a batch (`adv_norm=batch`) is left out, because it changes no sign.
"""

import asyncio
import inspect
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import orjson

from areal.api.errors import ArealError, RewardError
from areal.api.messages import Episode
from areal.api.reward_api import AsyncRewardWrapper, as_reward, settings_of
from areal.store.filters import EpisodeFilter
from areal.store.search import EpisodeLine, StoreSearch
from areal.utils.conversation import answer_of, content_text, task_of
from areal.utils.shorten import first_line
from areal.viewer.tokens import TokenTexts, load_texts, run_config

DIRECTORY = "rescored"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
POSITIONAL = 4
"""Arguments that a reward function gets by position."""
AT_ONCE = 32
PAGE_EPISODES = 200
DEVIATION_EPS = 1e-6


class RescoreError(ArealError):
    """Something cannot be scored again, or be written down."""


@dataclass
class RescoredEpisode:
    id: int
    group: int
    sample: int
    step: int | None
    old: float
    new: float | None
    """None = the function failed."""
    old_advantage: float = 0.0
    new_advantage: float | None = None
    failure: str = ""


@dataclass
class Rescored:
    name: str
    reward_fn: str
    filter: str
    at: float
    baseline: str
    norm: str
    episodes: list[RescoredEpisode] = field(default_factory=list)
    gained: list[int] = field(default_factory=list)
    """Groups whose rewards were all equal and are not any more."""
    lost: list[int] = field(default_factory=list)
    """Groups whose rewards differed and would all be equal."""
    groups: int = 0

    @property
    def failures(self) -> int:
        return sum(each.new is None for each in self.episodes)

    @property
    def changed(self) -> int:
        return sum(each.new is not None and each.new != each.old for each in self.episodes)

    def means(self) -> tuple[float, float]:
        """Old and new, of those that could be scored; 0 if none could."""
        scored = [(each.old, each.new) for each in self.episodes if each.new is not None]
        return (fmean(old for old, _ in scored), fmean(new for _, new in scored)) if scored else (0.0, 0.0)


async def rescore(
    directory: Path,
    reward_fn: Callable[..., Any],
    *,
    name: str,
    reward_name: str,
    chosen: EpisodeFilter,
    words: str = "",
    timeout_seconds: float = 15.0,
) -> Rescored:
    """Score the chosen episodes again; one that fails is told and does not end the others."""
    wrapper = AsyncRewardWrapper(reward_fn, timeout_seconds=timeout_seconds)
    with StoreSearch(directory, at_rest=True) as store:
        config = run_config(store)
        actor = config.get("actor") or {}
        baseline, norm = str(actor.get("group_baseline", "mean")), str(actor.get("adv_norm", "none"))
        found = Rescored(name, reward_name, words, time.time(), baseline, norm)
        texts = load_texts(directory, config)
        async for episode in _scored(store, chosen, wrapper, texts):
            found.episodes.append(episode)
    if not found.episodes:
        raise RescoreError(f"there is nothing to score: no episode is found by {words!r}; choose others with --filter")
    _add_advantages(found)
    return found


async def _scored(
    store: StoreSearch, chosen: EpisodeFilter, wrapper: AsyncRewardWrapper, texts: TokenTexts
) -> AsyncIterator[RescoredEpisode]:
    left_out = _not_passed(wrapper.reward_fn)
    turn = asyncio.Semaphore(AT_ONCE)

    async def score(line: EpisodeLine, episode: Episode, task: dict[str, Any]) -> RescoredEpisode:
        made = RescoredEpisode(line.id, line.task_id, line.sample, line.step, line.reward, None)
        arguments = _arguments(episode, texts)
        keywords = {key: value for key, value in task.items() if key not in left_out}
        async with turn:
            try:
                made.new = as_reward(await wrapper(*arguments, **keywords), "the reward function")
            except RewardError as error:
                made.failure = first_line(error)
        return made

    place, more = None, True
    while more:
        page = store.page(chosen, "group", place, PAGE_EPISODES)
        work = []
        for task_id, lines in groupby(page.episodes, key=attrgetter("task_id")):
            episodes, group = store.episodes(task_id), store.group(task_id)
            task = task_of(group.task) if group is not None else {}
            work += [score(line, episodes[line.id], task) for line in lines if line.id in episodes]
        for scored in await asyncio.gather(*work):
            yield scored
        place, more = page.next, page.next is not None


def _arguments(episode: Episode, texts: TokenTexts) -> tuple[str, str, list[int], list[int]]:
    """Of the last answer: the prompt as text, the answer, and the tokens of both if they are kept."""
    completion = answer_of(episode.messages)
    last = len(episode.nodes) - 1 if episode.nodes else None
    for row in reversed(episode.rows):
        index = int(row.completion_index.max()) if last is None else last
        places = np.flatnonzero(row.completion_index == index)
        if index >= 0 and len(places):
            prompt_ids = row.input_ids[: int(places[0])].tolist()
            prompt = "".join(texts.of(prompt_ids)) if texts.known else _asked(episode)
            return prompt, completion, prompt_ids, row.input_ids[places].tolist()
    return _asked(episode), completion, [], []


def _asked(episode: Episode) -> str:
    """What was said to the model before its last answer."""
    said = [message for message in episode.messages if message.get("role") != "assistant"]
    return "\n".join(content_text(message.get("content")) for message in said)


def _not_passed(reward_fn: Callable[..., Any]) -> frozenset[str]:
    """Keys of a task that have the name of an argument which is given by position, or of a setting."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = [each for each in inspect.signature(reward_fn).parameters.values() if each.kind in kinds]
    except (TypeError, ValueError):  # some functions written in C have no signature
        return frozenset(("prompt", "completion", "prompt_ids", "completion_ids")) | settings_of(reward_fn)
    return frozenset(each.name for each in parameters[:POSITIONAL]) | settings_of(reward_fn)


def _add_advantages(found: Rescored) -> None:
    """Also say which groups gain or lose signal; one with a failed call is not compared."""
    ordered = sorted(found.episodes, key=attrgetter("group", "sample"))
    for number, members in groupby(ordered, key=attrgetter("group")):
        group = list(members)
        found.groups += 1
        for each, advantage in zip(group, advantages_of([each.old for each in group], found), strict=True):
            each.old_advantage = advantage
        new = [each.new for each in group if each.new is not None]
        if len(new) < len(group):
            continue
        for each, advantage in zip(group, advantages_of(new, found), strict=True):
            each.new_advantage = advantage
        had, has = len({each.old for each in group}) > 1, len(set(new)) > 1
        if has and not had:
            found.gained.append(number)
        if had and not has:
            found.lost.append(number)


def advantages_of(rewards: Sequence[float], found: Rescored) -> list[float]:
    mean = rewards[0] if len(set(rewards)) == 1 else fmean(rewards)  # exactly, where a rounded mean would not be
    middle = 0.0 if found.baseline in ("none", "batch") else mean
    spread = stdev(rewards) if len(rewards) > 1 and found.norm == "group" else 0.0
    if found.norm == "group":
        return [(each - middle) / (spread + DEVIATION_EPS) if spread else 0.0 for each in rewards]
    # Against the mean of the others, a reward is further from it by n / (n - 1).
    further = len(rewards) / (len(rewards) - 1) if found.baseline == "leave_one_out" and len(rewards) > 1 else 1.0
    return [(each - middle) * further for each in rewards]


def place_for(directory: Path, name: str, *, force: bool) -> Path:
    """Where a result of that name goes; raises RescoreError if that is not possible."""
    if NAME.fullmatch(name) is None:
        raise RescoreError(f"a name is letters, digits, `.`, `_` and `-`, got {name!r}; choose another --name")
    path = directory / DIRECTORY / f"{name}.json"
    if path.exists() and not force:
        raise RescoreError(f"a result is a new file, but {path} exists; choose another --name or add --force")
    return path


def write_rescored(path: Path, found: Rescored) -> None:
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_bytes(orjson.dumps(asdict(found)))
    os.replace(fresh, path)


def find_rescored(directory: Path) -> list[str]:
    """The names of what was written, the newest first."""
    found = [path for path in (directory / DIRECTORY).glob("*.json") if NAME.fullmatch(path.stem)]
    return [path.stem for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def read_rescored(directory: Path, name: str) -> Rescored:
    """Raises RescoreError for a file that is not as it was written."""
    path = directory / DIRECTORY / f"{name}.json"
    try:
        values = orjson.loads(path.read_bytes())
        episodes = [RescoredEpisode(**each) for each in values.pop("episodes")]
        return Rescored(**values, episodes=episodes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RescoreError(f"{path} cannot be read: {first_line(error)}; score again with --force") from None
