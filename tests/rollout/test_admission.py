"""How many groups may be in flight."""

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
        self.started_at: list[int] = []
        self.ready_from: list[int] = []
        self.training = False

    @rule(reserved=st.integers(0, 3))
    def start_what_may(self, reserved):
        for _ in range(self.admission.capacity(reserved)):
            self.admission.start()
            self.started_at.append(self.admission.version)

    @precondition(lambda self: self.started_at)
    @rule(data=st.data())
    def end_one(self, data):
        born = self.started_at.pop(data.draw(st.integers(0, len(self.started_at) - 1)))
        if data.draw(st.booleans()) or self.admission.is_stale(born):
            self.admission.reject()
        else:
            self.admission.accept()
            self.ready_from.append(born)

    @precondition(lambda self: not self.training and len(self.ready_from) >= self.admission.batch_size)
    @rule()
    def take(self):
        self.ready_from.sort()
        for born in self.ready_from[: self.admission.batch_size]:
            assert self.admission.version - born <= self.admission.max_staleness
        del self.ready_from[: self.admission.batch_size]
        self.admission.consume(self.admission.batch_size)
        self.training = True
        if self.admission.max_staleness == 0:
            assert self.admission.running == 0

    @precondition(lambda self: self.training)
    @rule()
    def publish(self):
        self.admission.version += 1
        self.training = False
        for born in list(self.ready_from):
            if self.admission.is_stale(born):
                self.admission.expire()
                self.ready_from.remove(born)

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
        assert (
            self.training
            or over
            or admission.running
            or admission.capacity()
            or len(self.ready_from) >= admission.batch_size
        )


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_reserved_room_is_not_given_to_groups():
    admission = Admission(batch_size=8, max_staleness=0, max_running=4, total_groups=100)
    assert [admission.capacity(reserved) for reserved in (0, 3, 4, 9)] == [4, 1, 0, 0]


def test_age_is_counted_in_versions():
    admission = Admission(batch_size=1, max_staleness=2, max_running=1, total_groups=9, version=5)
    assert [admission.is_stale(version) for version in (2, 3, 5)] == [True, False, False]
