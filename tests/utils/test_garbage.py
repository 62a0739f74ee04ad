import gc

from areal.utils import garbage
from areal.utils.process_pool.calls import PackedFunction, PoolCall


def test_the_collector_of_a_process_of_others_is_left_as_it_was() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with garbage.settled():
        assert gc.get_threshold()[0] == garbage.NEW_OBJECTS
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_a_call_of_the_process_pool_leaves_nothing_to_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            call = PoolCall(PackedFunction("f", b"", b""), b"", 1.0)
            call.kill_on_cancel(None)
            call.settle(1.0)
            assert call.result() == 1.0
        del call
        assert gc.collect() == 0
    finally:
        gc.enable()
