"""Whole runs of the real admission and pipeline on a virtual clock: whatever happens, under `wait` every group that was
sampled is trained, none too old. A run that waits for something that cannot happen raises, so none hangs."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_workers import group, make_pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api.errors import GroupLost, RejectReason
from areal.api.messages import GroupResult, GroupTask
from areal.rollout.dispatch import GroupWorker
from areal.rollout.pipeline import Pipeline
from areal.simulation.scenario import run_virtually


@dataclass
class Run:
    seed: int
    steps: int = 6
    first_step: int = 0
    """It is resumed there."""
    batch_size: int = 2
    max_staleness: int = 2
    max_running: int = 8
    sigma: float = 1.0
    """Of lognormal durations with a median of 1 s."""
    rejected: float = 0.0
    filtered: float = 0.0
    lost: float = 0.0
    """Shares of groups."""
    unasked: float = 0.0
    """The share of a group's time that passes before it asks the model, for a quarter of them."""
    workers: int = 1
    train_seconds: float = 0.5
    evaluates: bool = False
    when_stale: str = "wait"
    generated: dict[int, float] = field(default_factory=dict)
    """Seconds of the groups that ended and are to be trained, by task."""
    trained: dict[int, float] = field(default_factory=dict)
    ages: list[int] = field(default_factory=list)
    stale: int = 0
    seconds: float = 0.0
    expiring_seconds: float = 0.0

    def play(self) -> "Run":
        run_virtually(self._play())
        return self

    async def _play(self) -> None:
        draw = random.Random(self.seed)
        workers: list[Any] = [UnreliableWorker(self, random.Random(f"{self.seed}-{n}")) for n in range(self.workers)]
        pipeline = make_pipeline(
            workers,
            keep=lambda result: result.task_id in self.generated,
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            max_running=self.max_running,
            total_groups=self.steps * self.batch_size,
            consumed=self.first_step * self.batch_size,
            when_stale=self.when_stale,
            max_idle_rejections=10**9,
        )
        for worker in workers:
            worker.pipeline = pipeline
        pipeline.publish(self.first_step, "")
        for version in range(self.first_step, self.steps):
            for result in await pipeline.take(self.batch_size):
                assert result.task_id not in self.trained
                self.trained[result.task_id] = result.episodes[0].seconds
                self.ages.append(version - result.oldest_version)
            self.expiring_seconds += pipeline.expiring_wait_seconds
            await asyncio.sleep(draw.uniform(0, 2 * self.train_seconds))
            pipeline.publish(version + 1, "")
            if self.evaluates and draw.random() < 0.5:
                await pipeline.evaluate([{}] * 3, greedy=False, max_running=self.max_running)
        self.seconds = asyncio.get_running_loop().time()
        self.stale = pipeline.rejections.counts[RejectReason.STALE]
        assert pipeline.admission.running == pipeline.admission.ready == 0
        await pipeline.aclose()


class UnreliableWorker(GroupWorker):
    """Takes its time for each group; rejects or loses some, and is away for a while after that."""

    pipeline: Pipeline

    def __init__(self, run: Run, draw: random.Random) -> None:
        self._run = run
        self._draw = draw
        self._unasked: set[int] = set()
        self._back = asyncio.Event()
        self._back.set()

    @property
    def present(self) -> bool:
        return self._back.is_set()

    async def unasked_groups(self) -> list[int]:
        found = [task_id for task_id in self._unasked if self._draw.random() < 0.8]
        await asyncio.sleep(self._draw.choice((0.0, 0.1, 3.0)))  # the answer may be late
        return found

    async def until_present(self) -> None:
        await self._back.wait()

    async def run_group(self, task: GroupTask) -> GroupResult:
        run, draw = self._run, self._draw
        seconds = draw.lognormvariate(0, run.sigma)
        before_its_first_token = draw.choice((0.0, 0.0, 0.3, run.unasked)) * seconds
        self._unasked.add(task.task_id)
        await asyncio.sleep(before_its_first_token)
        self._unasked.discard(task.task_id)
        version = self.pipeline.admission.version
        await asyncio.sleep(seconds - before_its_first_token)
        if not task.is_eval and draw.random() < run.lost:
            self._back.clear()
            asyncio.get_running_loop().call_later(draw.uniform(0, 3), self._back.set)
            raise GroupLost("the worker has ended")
        if draw.random() < run.rejected:
            return group(task.task_id, version, episodes=0, rejected=1)
        result = group(task.task_id, version)
        result.episodes[0].seconds = seconds
        if draw.random() >= run.filtered and not task.is_eval:
            run.generated[task.task_id] = seconds
        return result


RUNS = st.builds(
    Run,
    seed=st.integers(0, 10**6),
    steps=st.integers(3, 12),
    first_step=st.integers(0, 3),
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    max_running=st.integers(1, 24),
    sigma=st.sampled_from((0.0, 0.5, 1.0, 2.0)),
    rejected=st.sampled_from((0.0, 0.2)),
    filtered=st.sampled_from((0.0, 0.5)),
    lost=st.sampled_from((0.0, 0.3)),
    unasked=st.sampled_from((0.0, 0.99)),
    workers=st.integers(1, 3),
    train_seconds=st.sampled_from((0.0, 0.5, 5.0)),
    evaluates=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(RUNS)
def test_whatever_happens_every_sampled_group_is_trained_once_and_none_too_old(run: Run) -> None:
    run.play()
    assert run.trained == run.generated  # so long ones are trained as often as they are generated
    assert len(run.trained) == (run.steps - min(run.first_step, run.steps)) * run.batch_size
    assert max(run.ages, default=0) <= run.max_staleness
    assert run.stale == 0


@settings(max_examples=30, deadline=None)
@given(RUNS, st.sampled_from(("drop", "train")))
def test_without_waiting_no_batch_is_held_up_and_only_drop_loses_groups(run: Run, when_stale: str) -> None:
    run.when_stale = when_stale
    run.play()
    assert run.expiring_seconds == 0
    assert run.trained.items() <= run.generated.items()
    if when_stale == "drop":
        assert max(run.ages, default=0) <= run.max_staleness
        assert run.stale == len(run.generated) - len(run.trained)
    else:
        assert run.trained == run.generated


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_dropping_takes_the_longest_groups_out_of_training_and_waiting_does_not(sigma: float) -> None:
    def played(when_stale: str) -> Run:
        return Run(1, steps=60, batch_size=8, max_running=32, sigma=sigma, when_stale=when_stale).play()

    def bias(run: Run) -> float:
        trained, generated = (list(each.values()) for each in (run.trained, run.generated))
        return sum(trained) / len(trained) / (sum(generated) / len(generated)) - 1

    assert bias(played("drop")) < -0.05
    waiting = played("wait")
    assert bias(waiting) == pytest.approx(0)
    assert waiting.expiring_seconds > 0


def test_batches_do_not_wait_for_groups_that_have_asked_the_model_for_nothing() -> None:
    """Slow before its first call, not after it: such a group's tokens are as new as the weights."""
    played = [
        Run(1, steps=40, batch_size=4, max_running=16, sigma=1.0, unasked=unasked).play() for unasked in (0.0, 0.99)
    ]
    early, late = played
    assert early.trained.keys() == late.trained.keys() == late.generated.keys()
    assert late.expiring_seconds < early.expiring_seconds
