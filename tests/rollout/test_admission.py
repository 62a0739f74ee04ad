"""How many groups may be in flight, and which of them a batch waits for."""

import itertools
from contextlib import ExitStack

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.rollout.admission import Admission


class Run(RuleBasedStateMachine):
    """Everything that can happen to groups in a run, in any order that a trainer and workers can cause."""

    @initialize(
        batch_size=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        max_running=st.integers(1, 8),
        steps=st.integers(1, 5),
        resumed=st.integers(0, 3),
    )
    def begin(self, batch_size, max_staleness, max_running, steps, resumed):
        self.first = min(resumed, steps)
        self.admission = Admission(
            batch_size,
            max_staleness,
            max_running,
            total_groups=steps * batch_size,
            version=self.first,
            consumed=self.first * batch_size,
        )
        self.tasks = itertools.count()
        self.started_at: list[int] = []
        self.running: list[int] = []
        """The task of each."""
        self.sampling: list[ExitStack] = []
        self.ready_from: list[int] = []
        self.training = False

    @rule(reserved=st.integers(0, 3))
    def start_what_may(self, reserved):
        for _ in range(self.admission.capacity(reserved)):
            self.admission.start()
            self.started_at.append(self.admission.version)
            self.running.append(next(self.tasks))
            self.sampling.append(ExitStack())
            self.sampling[-1].enter_context(self.admission.sampling(self.running[-1]))

    @precondition(lambda self: self.started_at)
    @rule(data=st.data())
    def end_one(self, data):
        place = data.draw(st.integers(0, len(self.started_at) - 1))
        born = self.started_at.pop(place)
        self.running.pop(place)
        self.sampling.pop(place).close()
        if data.draw(st.integers(0, 4)) == 4:
            self.admission.reject()
        else:
            assert not self.admission.is_stale(born)
            self.admission.accept(born)
            self.ready_from.append(born)

    @precondition(lambda self: self.started_at)
    @rule(data=st.data())
    def lose_one_and_run_it_again(self, data):
        place = data.draw(st.integers(0, len(self.started_at) - 1))
        self.sampling[place].close()
        self.sampling[place].enter_context(self.admission.sampling(self.running[place]))
        self.started_at[place] = self.admission.version

    @precondition(lambda self: self.started_at)
    @rule(data=st.data())
    def find_that_one_has_no_token(self, data):
        """It may have been so at an earlier version: answers of workers come late."""
        place = data.draw(st.integers(0, len(self.started_at) - 1))
        version = data.draw(st.integers(self.first, self.admission.version))
        self.admission.unasked([self.running[place]], version)
        self.started_at[place] = max(version, self.started_at[place])

    @precondition(lambda self: not self.training and self.may_take())
    @rule()
    def take(self):
        self.ready_from.sort()
        for born in self.ready_from[: self.admission.batch_size]:
            assert self.admission.version - born <= self.admission.max_staleness
        self.admission.consume(self.ready_from[: self.admission.batch_size])
        del self.ready_from[: self.admission.batch_size]
        self.training = True
        if self.admission.max_staleness == 0:
            assert self.admission.running == 0

    @precondition(lambda self: self.training)
    @rule(data=st.data())
    def publish(self, data):
        wave = data.draw(st.integers(1, max(1, self.admission.max_staleness)))
        self.admission.publish(self.admission.version + 1, wave)
        self.training = False

    def may_take(self):
        return len(self.ready_from) >= self.admission.batch_size and not self.admission.awaited()

    @invariant()
    def nothing_grows_too_old_to_be_trained(self):
        assert not any(map(self.admission.is_stale, (*self.started_at, *self.ready_from)))

    @invariant()
    def synchronous_training_starts_nothing_while_it_trains(self):
        if self.training and self.admission.max_staleness == 0:
            assert self.admission.capacity() == 0

    @invariant()
    def bounds_hold(self):
        admission = self.admission
        assert admission.running == len(self.started_at) <= admission.max_running
        assert admission.ready == len(self.ready_from)
        claimed = admission.consumed + admission.ready + admission.running
        assert claimed <= admission.total_groups
        assert claimed <= (admission.version + admission.max_staleness + 1) * admission.batch_size

    @invariant()
    def run_can_always_go_on(self):
        """Unless it trains or is over, something runs, may start, or is ready to be taken."""
        admission = self.admission
        over = admission.consumed == admission.total_groups
        assert self.training or over or admission.running or admission.capacity() or self.may_take()


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_reserved_room_is_not_given_to_groups():
    admission = Admission(batch_size=8, max_staleness=0, max_running=4, total_groups=100)
    assert [admission.capacity(reserved) for reserved in (0, 3, 4, 9)] == [4, 1, 0, 0]


def test_age_is_counted_in_versions():
    admission = Admission(batch_size=1, max_staleness=2, max_running=1, total_groups=9, version=5)
    assert [admission.is_stale(version) for version in (2, 3, 5)] == [True, False, False]


def test_batch_waits_as_soon_as_later_ones_could_not_take_what_it_leaves():
    """Two batches would have to be taken at version 2: so one of them is waited for at version 1."""
    admission = Admission(batch_size=2, max_staleness=2, max_running=9, total_groups=99)
    with ExitStack() as old:
        for _ in range(6):
            admission.start()
        for task_id in range(4):
            old.enter_context(admission.sampling(task_id))
        for _ in range(2):
            admission.accept(0)
        assert not admission.awaited()
        admission.consume([0, 0])
        admission.publish(1)
        for _ in range(2):
            admission.start()
            admission.accept(1)
        assert admission.awaited() == 4
        admission.unasked([0, 1], 1)
        assert not admission.awaited()  # the other two can be taken at version 2
    for _ in range(2):
        admission.accept(0)
    assert not admission.awaited()


def test_groups_are_admitted_in_waves_and_replaced_at_once():
    admission = Admission(batch_size=2, max_staleness=2, max_running=9, total_groups=99)
    started = []
    for version in range(1, 5):
        started.append(admission.capacity())
        for _ in range(admission.capacity()):
            admission.start()
            admission.accept(0)
        admission.consume([0, 0])
        admission.publish(version, wave=2)
    assert started == [6, 0, 4, 0]
    for _ in range(admission.capacity()):
        admission.start()
    admission.publish(5, wave=2)
    admission.reject()
    assert admission.capacity() == 1
