"""What does the run store cost a run, and how fast is it read? Time and bytes on generated episodes.

Episodes have every array that a run has, and conversations in a vocabulary as skewed as a language's. They are written
as a run writes them and read as a viewer would. Then a run of many episodes has its store on disks that are slow
(`benchmarks/slow_disk.c`): how long do those who hand things over wait, how long do steps, and what gathers meanwhile?
"""

import argparse
import itertools
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.errors import RejectReason
from areal.api.messages import Episode, GroupResult, Rejection, Row, TrainedRow
from areal.store.filters import parse_filter
from areal.store.records import StepRecord
from areal.store.search import StoreSearch
from areal.store.writer import StoreWriter
from benchmarks.report import Aim, main

EPISODES, RUN_EPISODES = 100_000, 10_000
SAMPLES = 8
BATCH = 32
"""Groups in a step."""
REJECTED_EVERY = 20
"""Groups: one of so many is rejected."""
WORDS = 20_000
GROUP_TOKENS = (16, 512, 4096)
REPEATS = 7
ETA = 2
"""Batches that a run may be ahead of the last committed step, besides the one that is trained."""
STEP_SECONDS = 0.5
DISKS = {
    "fast": {},
    "slow": {"SLOW_FSYNC_SECONDS": "0.3", "SLOW_BYTES_PER_SECOND": "2e7"},
    "too slow": {"SLOW_FSYNC_SECONDS": "0.3", "SLOW_BYTES_PER_SECOND": "1e6"},
}
"""The last one takes less than the run brings."""
DEADLINE_SECONDS = 600.0
PHRASE = "the parcel is lost"
"""It is said in one of a thousand conversations."""


class Talk:
    """Conversations in words whose frequencies fall as in a language; the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)
        letters = "etaoinshrdlucmfwypvbgk"
        made = {"".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(WORDS)}
        self._words = ["the", "and", "of", "to", *sorted(made)]
        shares = 1 / np.arange(1, len(self._words) + 1)
        self._edges = list(itertools.accumulate(shares / shares.sum()))
        self._draw = draw

    def sentence(self, words: int) -> str:
        text = " ".join(self._draw.choices(self._words, cum_weights=self._edges, k=words))
        return f"{text.capitalize()}."

    def conversation(self, words: int) -> list[dict[str, Any]]:
        """A question, a tool that is called, and an answer."""
        lost = f" {PHRASE}." if self._draw.random() < 0.001 else ""
        called = {"name": "look_up", "arguments": f'{{"order": {self._draw.randrange(10**6)}}}'}
        return [
            {"role": "user", "content": self.sentence(words // 3)},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": called}]},
            {"role": "tool", "content": self.sentence(words // 6)},
            {"role": "assistant", "content": self.sentence(words // 2) + lost},
        ]


def episode_of(tokens: int, version: int, draw: np.random.Generator, talk: Talk) -> Episode:
    """Two calls of the model; two thirds of the tokens are sampled."""
    place = np.arange(tokens)
    sampled = place % (tokens // 2) >= tokens // 6
    reward = float(draw.random() < 0.4) + 0.1 * float(draw.integers(0, 3))
    row = Row(
        input_ids=np.minimum(draw.zipf(1.2, tokens), 50_000).astype(np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -draw.exponential(0.5, tokens), 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        returns=np.where(sampled, reward, 0).astype(np.float32),
        completion_index=np.where(sampled, place // (tokens // 2), -1).astype(np.int32),
        temperatures=np.ones(tokens, np.float32),
        reward=reward,
        truncated=bool(draw.random() < 0.05),
    )
    seconds = float(draw.lognormal(0.0, 1.0))
    half = int(sampled.sum()) // 2
    turns = [(0.0, 0.3 * seconds, half), (0.5 * seconds, seconds, half)]
    return Episode([row], reward, talk.conversation(tokens * 3 // 4), {"tool_calls": 1.0}, 2, seconds, turns)


def groups(episodes: int, tokens: tuple[int, int], seed: int = 0) -> Iterator[GroupResult]:
    draw, talk = np.random.default_rng(seed), Talk(seed)
    for task_id in range(episodes // SAMPLES):
        version = max(0, task_id // BATCH - int(draw.integers(0, 3)))
        lengths = draw.integers(*tokens, size=SAMPLES, endpoint=True)
        made = [episode_of(int(length), version, draw, talk) for length in lengths]
        yield GroupResult(task_id, made, [], {version: "digest"})


def trained_rows(episode: Episode) -> list[TrainedRow]:
    """Log-probs near the sampler's, one advantage for each row."""
    rows = []
    for row in episode.rows:
        own = row.logprobs[row.loss_mask]
        rows.append(
            TrainedRow(
                advantages=np.full_like(own, episode.reward - 0.5), logprobs=own + np.float32(1e-4) * np.sin(own)
            )
        )
    return rows


def step_of(number: int, batch: list[GroupResult]) -> StepRecord:
    trained = {group.task_id: [trained_rows(episode) for episode in group.episodes] for group in batch}
    rewards = [episode.reward for group in batch for episode in group.episodes]
    figures = {"reward": float(np.mean(rewards)), "loss": 0.1, "grad_norm": 1.0}
    return StepRecord(
        number, number, f"digest {number}", [group.task_id for group in batch], figures, {"calls": number}, trained
    )


def write(directory: Path, episodes: int) -> float:
    """A whole run as fast as it can be written; returns the seconds that it took, without those to make episodes."""
    spent, batch, step = 0.0, [], 0
    with StoreWriter(directory) as store:
        for group in groups(episodes, (60, 240)):
            began = time.perf_counter()
            store.started(group.task_id, step, {"question": group.episodes[0].messages[0]["content"]})
            if group.task_id % REJECTED_EVERY == REJECTED_EVERY - 1:
                store.rejected(group, Rejection(RejectReason.STALE, f"{group.task_id} is too old", "Traceback …"))
            else:
                store.ready(group)
                batch.append(group)
            if len(batch) == BATCH:
                step += 1
                store.step(step_of(step, batch))
                batch = []
            spent += time.perf_counter() - began
        began = time.perf_counter()
        store.flush()
        return spent + time.perf_counter() - began


def commit_milliseconds(directory: Path, tokens: int) -> dict[str, float]:
    """From a group of so many tokens an episode to its commit: the median, and processor time, the mean."""
    made = list(groups(SAMPLES * 30, (tokens, tokens)))
    taken = []
    with StoreWriter(directory) as store:
        computing = time.process_time()
        for group in made:
            began = time.perf_counter()
            store.ready(group)
            store.flush()
            taken.append(time.perf_counter() - began)
        computed = time.process_time() - computing
    return {"commit_ms": 1000 * statistics.median(taken), "processor_ms": 1000 * computed / len(made)}


def query_milliseconds(directory: Path) -> dict[str, float]:
    """What a viewer asks, the fastest of a few times each; other processes slow single ones down."""
    filters = {name: parse_filter(line) for name, line in {
        "three ways": "reward<0.5 tokens>60 step:100-300",
        "phrase": f'"{PHRASE}"',
        "common": '"the"',
        "both": 'reward>1 seconds>5 "the"',
    }.items()}  # fmt: skip
    with StoreSearch(directory) as store:
        middle = store.count() // 2
        asked: dict[str, Callable[[], object]] = {
            "open_and_count": lambda: _open_and_count(directory),
            "first_page": store.page,
            "page_in_the_middle": lambda: store.page(after=(None, middle)),
            "first_page_by_tokens": lambda: store.page(order="-tokens"),
            "three_way_filter": lambda: store.page(filters["three ways"]),
            "count_with_filter": lambda: store.count(filters["three ways"]),
            "phrase": lambda: store.page(filters["phrase"]),
            "common_word_newest_100": lambda: store.page(filters["common"]),
            "count_of_common_word": lambda: store.count(filters["common"]),
            "common_word_and_filter": lambda: store.page(filters["both"]),
            "histogram": lambda: store.histogram("seconds"),
            "histogram_with_filter": lambda: store.histogram("tokens", filters["three ways"]),
            "curve_by_step": lambda: store.curve("reward"),
            "rejections": store.rejection_kinds,
            "groups_of_a_step": lambda: store.groups(1),
            "one_trajectory": lambda: store.trajectory(middle),
        }
        return {name: _fastest(ask) for name, ask in asked.items()}


def _open_and_count(directory: Path) -> None:
    with StoreSearch(directory) as store:
        store.count()


def _fastest(ask: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began)
    return 1000 * min(taken)


def drive(directory: Path, episodes: int) -> dict[str, float]:
    """A run whose groups end evenly while steps are trained, as far ahead of the committed step as η allows.

    One thread hands over what the rollout sees, another takes steps: what a driver does, without a model.
    """
    made = list(groups(min(episodes, 2048), (60, 240)))
    count = episodes // SAMPLES // BATCH * BATCH
    ahead, ended = threading.Semaphore((ETA + 1) * BATCH), queue.SimpleQueue[GroupResult]()
    calls, steps, gathered = [], [], 0

    def call(change: Callable[[], None]) -> None:
        nonlocal gathered
        began = time.perf_counter()
        change()
        calls.append(time.perf_counter() - began)
        gathered = max(gathered, store.waiting)

    def produce() -> None:
        for task_id in range(count):
            if not ahead.acquire(timeout=DEADLINE_SECONDS):
                raise TimeoutError("no step was committed")
            like = made[task_id % len(made)]
            group = GroupResult(task_id, like.episodes, [], like.digests)
            call(partial(store.started, task_id, 0, {"question": "which?"}))
            time.sleep(STEP_SECONDS / BATCH)
            call(partial(store.ready, group))
            ended.put(group)

    with StoreWriter(directory) as store:
        threading.Thread(target=produce, daemon=True).start()
        began = time.perf_counter()
        for step in range(1, count // BATCH + 1):
            batch = [ended.get(timeout=DEADLINE_SECONDS) for _ in range(BATCH)]
            record = step_of(step, batch)
            asked = time.perf_counter()
            store.step(record)
            steps.append(time.perf_counter() - asked)
            for _ in range(BATCH):
                ahead.release()
        seconds = time.perf_counter() - began
    return {
        "call_us_p50": 1e6 * statistics.median(calls),
        "call_us_p99": 1e6 * statistics.quantiles(calls, n=100)[98],
        "call_us_max": 1e6 * max(calls),
        "step_commit_ms_p50": 1e3 * statistics.median(steps),
        "step_commit_ms_max": 1e3 * max(steps),
        "step_seconds": seconds / len(steps),
        "most_changes_waiting": gathered,
        **disk_speed(directory),
    }


def disk_speed(directory: Path) -> dict[str, float]:
    """What this process sees of the disk, to show that the slow one is slow."""
    with (directory / "probe").open("wb") as file:
        began = time.perf_counter()
        os.pwrite(file.fileno(), bytes(1 << 20), 0)
        written = time.perf_counter()
        os.fsync(file.fileno())
        return {
            "disk_mb_per_second": (1 << 20) / 1e6 / (written - began),
            "disk_fsync_ms": 1e3 * (time.perf_counter() - written),
        }


def drive_on(disk: str, directory: Path, episodes: int) -> dict[str, float]:
    """In a process of its own, for which every disk is so slow."""
    library = directory / "slow_disk.so"
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("slow_disk.c"), "-ldl"], check=True
    )
    (directory / disk).mkdir()
    words = [
        sys.executable,
        "-m",
        "benchmarks.store",
        "--drive",
        str(directory / disk),
        "--run-episodes",
        str(episodes),
    ]
    environment = {**os.environ, "LD_PRELOAD": str(library), **DISKS[disk]}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, timeout=DEADLINE_SECONDS, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def run(episodes: int, run_episodes: int) -> tuple[dict[str, Any], list[Aim]]:
    figures: dict[str, Any] = {"episodes": episodes, "run_episodes": run_episodes}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for part in ("run", *map(str, GROUP_TOKENS)):
            (directory / part).mkdir()
        figures["write_seconds"] = write(directory / "run", episodes)
        figures["megabytes"] = sum(path.stat().st_size for path in (directory / "run").iterdir()) / 1e6
        figures["query_ms"] = query_milliseconds(directory / "run")
        figures["group_of_8"] = {
            tokens: commit_milliseconds(directory / str(tokens), tokens) for tokens in GROUP_TOKENS
        }
        for disk in DISKS:
            of_run = run_episodes // 4 if disk == "too slow" else run_episodes
            figures[f"on a {disk} disk"] = drive_on(disk, directory, of_run)
    print(json.dumps(figures, indent=2), file=sys.stderr)
    return figures, aims(figures)


def aims(figures: dict[str, Any]) -> list[Aim]:
    query, fast, slow = figures["query_ms"], figures["on a fast disk"], figures["on a slow disk"]
    scans = [name for name in query if name not in ("first_page", "page_in_the_middle", "one_trajectory")]
    most = max(each["most_changes_waiting"] for name, each in figures.items() if name.startswith("on a "))
    return [
        Aim.at_most("megabytes", figures["megabytes"], 590 * figures["episodes"] / EPISODES),
        Aim.at_most("first page, ms", query["first_page"], 1.0),
        Aim.at_most("a page in the middle, ms", query["page_in_the_middle"], 1.0),
        Aim.at_most("one trajectory, ms", query["one_trajectory"], 1.0),
        *(Aim.at_most(f"{name.replace('_', ' ')}, ms", query[name], 200.0) for name in scans),
        Aim.at_most("a call on a slow disk, 99th percentile, us", slow["call_us_p99"], 1000.0),
        Aim.at_most("a step on a slow disk, against a fast one", slow["step_seconds"] / fast["step_seconds"], 1.25),
        # Two for each group that may be ahead: it has begun, it has ended.
        Aim.at_most("changes that wait to be written, on any disk", most, 2 * (ETA + 2) * BATCH),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--episodes", type=int, default=EPISODES, help=f"in the store that is read ({EPISODES})")
    parser.add_argument("--run-episodes", type=int, default=RUN_EPISODES, help=f"of a run ({RUN_EPISODES})")
    parser.add_argument("--drive", metavar="DIR", help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()
    if options.drive:
        print(json.dumps(drive(Path(options.drive), options.run_episodes)))
    else:
        main(__doc__ or "", partial(run, options.episodes, options.run_episodes), parser)
