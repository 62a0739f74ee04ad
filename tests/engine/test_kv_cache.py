"""Rows keep their contents through every move, and memory follows the sequences' lengths."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal.engine.inference.kv_cache import CacheShape, KeyValueCache

SHAPE = CacheShape(layers=2, heads=1, head_dim=3, dtype=torch.float32)
MOST = 1000


class CacheMachine(RuleBasedStateMachine):
    """Sequences join at the end, grow, and leave: the last row takes the place of one that left, as in the engine."""

    dense = True

    def __init__(self) -> None:
        super().__init__()
        self.cache = KeyValueCache(SHAPE, MOST, dense=self.dense)
        self.rows: list[tuple[float, int]] = []
        """The number that each row is full of, and its length."""
        self.marks = 0.0

    @rule(length=st.integers(1, 600))
    def join(self, length: int) -> None:
        self.marks += 1
        row = len(self.rows)
        self.cache.keep(row)
        self.cache.put(row, length)
        self.cache.block(row, length)[:] = self.marks
        self.rows.append((self.marks, length))

    @rule(length=st.integers(1, 600), samples=st.integers(1, 5))
    def join_as_a_group(self, length: int, samples: int) -> None:
        self.marks += 1
        first, *others = rows = range(len(self.rows), len(self.rows) + samples)
        self.cache.keep(first)
        for row in rows:
            self.cache.put(row, length + 1)
        self.cache.block(first, length + 1)[:] = self.marks
        self.cache.copy(first, others, length + 1)
        self.rows += [(self.marks, length + 1)] * samples

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.sampled_from([1, 1, 120]))
    def grow(self, data: st.DataObject, more: int) -> None:
        grown = data.draw(st.integers(0, len(self.rows) - 1))
        self.cache.keep(len(self.rows))
        for _ in range(min(more, MOST - self.rows[grown][1])):
            mark, length = self.rows[grown]
            self.rows[grown] = mark, length + 1
            self.cache.advance([length for _, length in self.rows])
            self.cache.block(grown, length + 1)[:, :, length] = mark

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.integers(0, len(self.rows) - 1))
        last = self.rows.pop()
        if gone < len(self.rows):
            self.cache.move(len(self.rows), gone)
            self.rows[gone] = last

    @invariant()
    def rows_hold_what_is_theirs(self) -> None:
        for row, (mark, length) in enumerate(self.rows):
            assert (self.cache.block(row, length) == mark).all()

    @invariant()
    def slots_have_one_row_each(self) -> None:
        for pool in self.cache.pools:
            assert len(pool.owners) <= pool.slots
            owned = {slot: row for slot, row in enumerate(pool.owners) if row >= 0}
            assert {slot: self.cache.slot_of(row).slot for slot, row in owned.items()} == {slot: slot for slot in owned}
            assert len(owned) == pool.rows
            assert len(owned) == len(pool.owners) or not self.dense


class SparseCacheMachine(CacheMachine):
    dense = False


TestRows = CacheMachine.TestCase
TestSparseRows = SparseCacheMachine.TestCase
TestRows.settings = TestSparseRows.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_row_that_leaves_a_cache_that_is_not_dense_moves_no_other() -> None:
    cache = KeyValueCache(SHAPE, MOST, dense=False)
    for row in range(4):
        cache.put(row, 10)
    cache.move(3, 1)
    assert [cache.slot_of(row).slot for row in range(3)] == [0, 3, 2]
    cache.put(3, 10)
    assert cache.slot_of(3).slot == 1


def test_one_long_sequence_among_many_short_ones_takes_its_own_memory() -> None:
    cache = KeyValueCache(SHAPE, 65536)
    for row in range(255):
        cache.put(row, 100)
    cache.put(255, 60_000)
    bytes_of_a_token = 2 * 2 * 3 * 4
    held = sum(pool.data.nbytes for pool in cache.pools)
    assert held <= bytes_of_a_token * (256 * 128 + 65536)


def test_memory_of_an_earlier_crowd_is_given_back() -> None:
    cache = KeyValueCache(SHAPE, 65536)
    for row in range(200):
        cache.put(row, 1000)
    cache.keep(0)
    cache.put(0, 5000)
    assert [pool.capacity for pool in cache._pools.values()] == [8192]
