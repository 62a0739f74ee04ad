import asyncio
import os
import signal
import sys
from typing import Any

import numpy as np
import pytest

from areal.api.errors import ContextLengthError
from areal.infra.rpc.channel import Channel, ChannelClosed, RemoteError
from areal.infra.rpc.connect import connect, serve
from areal.infra.rpc.frames import FrameError
from areal.infra.rpc.sockets import handshake_as_listener
from areal.infra.rpc.wire import api_wire


async def test_sync_and_async_handlers_answer(make_pair: Any) -> None:
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    caller, _ = await make_pair({"double": double, "negate": lambda x: -x})
    assert await caller.call("double", 4, timeout_seconds=10) == 8
    assert await caller.call("negate", 4, timeout_seconds=10) == -4


async def test_a_thousand_calls_in_flight_each_get_their_own_answer(make_pair: Any) -> None:
    arrived: list[int] = []
    all_arrived = asyncio.Event()

    async def meet(i: int) -> int:
        arrived.append(i)
        if len(arrived) == 1000:
            all_arrived.set()
        await all_arrived.wait()
        return i

    caller, _ = await make_pair({"meet": meet})
    answers = await asyncio.gather(*(caller.call("meet", i, timeout_seconds=60) for i in range(1000)))
    assert answers == list(range(1000))


async def test_both_ends_may_call_each_other(make_pair: Any) -> None:
    caller, listener = await make_pair({"ready": lambda: True})
    caller.handlers["name"] = lambda: "worker"
    assert await listener.call("name", timeout_seconds=10) == "worker"


async def test_our_errors_come_back_as_themselves(make_pair: Any) -> None:
    def refuse() -> None:
        raise ContextLengthError("9000 tokens do not fit 8192 positions")

    caller, _ = await make_pair({"generate": refuse})
    with pytest.raises(ContextLengthError, match=r"^9000 tokens do not fit 8192 positions$"):
        await caller.call("generate", timeout_seconds=10)


async def test_other_errors_come_back_with_type_text_and_traceback(make_pair: Any) -> None:
    async def fail() -> None:
        raise KeyError("missing")

    caller, _ = await make_pair({"fail": fail})
    with pytest.raises(RemoteError, match="the engine: KeyError: 'missing'") as caught:
        await caller.call("fail", timeout_seconds=10)
    assert caught.value.type_name == "KeyError"
    assert "in fail" in caught.value.remote_traceback


async def test_unknown_method_says_what_there_is(make_pair: Any) -> None:
    caller, _ = await make_pair({"generate": lambda: None})
    with pytest.raises(RemoteError, match=r"no handler 'generat'; there are \['generate'\]"):
        await caller.call("generat", timeout_seconds=10)


async def test_answer_that_cannot_travel_is_the_callers_error_and_the_channel_lives(make_pair: Any) -> None:
    caller, _ = await make_pair({"bad": object, "good": lambda: 1})
    with pytest.raises(RemoteError, match="cannot send object"):
        await caller.call("bad", timeout_seconds=10)
    assert await caller.call("good", timeout_seconds=10) == 1


class Sleeper:
    """A handler that never answers, and notices its cancellation."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def sleep(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def test_cancelling_a_call_cancels_the_remote_handler(make_pair: Any) -> None:
    sleeper = Sleeper()
    caller, _ = await make_pair({"sleep": sleeper.sleep})
    call = asyncio.ensure_future(caller.call("sleep", timeout_seconds=60))
    await asyncio.wait_for(sleeper.started.wait(), 10)
    call.cancel()
    await asyncio.wait_for(sleeper.cancelled.wait(), 10)
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_deadline_of_a_call_names_peer_and_method_and_cancels_the_handler(make_pair: Any) -> None:
    sleeper = Sleeper()
    caller, _ = await make_pair({"sleep": sleeper.sleep})
    with pytest.raises(TimeoutError, match=r"the engine did not answer 'sleep' within 0.05 s"):
        await caller.call("sleep", timeout_seconds=0.05)
    await asyncio.wait_for(sleeper.cancelled.wait(), 10)


class Beginner:
    """A handler that returns futures."""

    def __init__(self, count: int) -> None:
        self.futures: list[asyncio.Future[Any]] = []
        self.all_begun = asyncio.Event()
        self._count = count

    def begin(self) -> asyncio.Future[Any]:
        self.futures.append(asyncio.get_running_loop().create_future())
        if len(self.futures) == self._count:
            self.all_begun.set()
        return self.futures[-1]


async def test_a_future_that_a_handler_returns_is_answered_for_when_it_is_done(make_pair: Any) -> None:
    beginner = Beginner(5)
    caller, _ = await make_pair({"begin": beginner.begin})
    calls = [asyncio.ensure_future(caller.call("begin", timeout_seconds=60)) for _ in range(5)]
    await asyncio.wait_for(beginner.all_begun.wait(), 10)
    futures = beginner.futures
    futures[0].set_result([1])
    futures[1].set_exception(ContextLengthError("too long"))
    futures[2].set_result(object())
    futures[3].cancel()
    calls[4].cancel()
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert outcomes[0] == [1]
    assert isinstance(outcomes[1], ContextLengthError)
    assert "cannot send object" in str(outcomes[2])
    assert isinstance(outcomes[3], RemoteError)
    assert isinstance(outcomes[4], asyncio.CancelledError)
    with pytest.raises(asyncio.CancelledError):  # its caller has left
        await asyncio.wait_for(futures[4], 10)


async def test_futures_of_handlers_are_cancelled_when_the_peer_is_gone(make_pair: Any) -> None:
    beginner = Beginner(1)
    caller, _ = await make_pair({"begin": beginner.begin})
    call = asyncio.ensure_future(caller.call("begin", timeout_seconds=60))
    await asyncio.wait_for(beginner.all_begun.wait(), 10)
    await caller.close()
    with pytest.raises(ChannelClosed):
        await call
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(beginner.futures[0], 10)


async def test_answers_of_futures_wait_while_the_peer_reads_too_slowly(make_pair: Any) -> None:
    caller, listener = await make_pair({})
    caller.handlers["note"] = lambda data: None
    answered = asyncio.get_running_loop().create_future()
    listener.handlers["large"] = lambda: answered
    call = asyncio.ensure_future(caller.call("large", timeout_seconds=60))
    while not listener.is_full:
        listener.notify("note", bytes(1 << 20))
    answered.set_result("at last")
    assert await asyncio.wait_for(call, 30) == "at last"


async def test_handler_that_cancels_itself_still_answers(make_pair: Any) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    caller, _ = await make_pair({"give_up": give_up})
    with pytest.raises(RemoteError, match="CancelledError"):
        await caller.call("give_up", timeout_seconds=10)


async def test_closing_one_end_fails_pending_calls_and_cancels_handlers_at_the_other(make_pair: Any) -> None:
    sleeper = Sleeper()
    caller, listener = await make_pair({"sleep": sleeper.sleep})
    call = asyncio.ensure_future(caller.call("sleep", timeout_seconds=60))
    await asyncio.wait_for(sleeper.started.wait(), 10)
    await listener.close()
    with pytest.raises(ChannelClosed, match="the channel to the engine is closed: the peer disconnected"):
        await call
    assert sleeper.cancelled.is_set()
    assert await asyncio.wait_for(caller.closed, 10) == "the peer disconnected"
    assert not caller.is_open
    with pytest.raises(ChannelClosed, match="the engine"):
        await caller.call("sleep", timeout_seconds=10)
    with pytest.raises(ChannelClosed):
        caller.notify("sleep")


async def test_waiting_for_the_end_with_a_deadline_leaves_the_channel_open(make_pair: Any) -> None:
    caller, _ = await make_pair({"one": lambda: 1})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(caller.closed, 0.01)
    assert await caller.call("one", timeout_seconds=10) == 1


async def test_handler_may_close_its_own_channel(make_pair: Any) -> None:
    caller, listener = await make_pair({"ready": lambda: True})
    listener.handlers["leave"] = listener.close
    with pytest.raises(ChannelClosed):
        await caller.call("leave", timeout_seconds=10)


async def test_notifications_arrive_in_order_and_their_failures_are_logged(
    make_pair: Any, log_lines: list[str]
) -> None:
    seen: list[int] = []

    def note(i: int) -> None:
        if i == 2:
            raise ValueError("two")
        seen.append(i)

    caller, _ = await make_pair({"note": note, "ready": lambda: True})
    for i in range(4):
        caller.notify("note", i)
    await caller.call("ready", timeout_seconds=10)
    assert seen == [0, 1, 3]
    assert "ValueError: two" in log_lines[0]


async def test_oversized_request_is_refused_before_it_is_sent(make_pair: Any) -> None:
    caller, _ = await make_pair({"size": len}, max_frame_bytes=1000)
    with pytest.raises(FrameError, match="at most 1000 bytes, got 20"):
        await caller.call("size", b"x" * 2000, timeout_seconds=10)
    assert await caller.call("size", b"x" * 900, timeout_seconds=10) == 900


async def test_oversized_answer_is_an_error_of_its_call_only(make_pair: Any) -> None:
    caller, _ = await make_pair({"make": lambda n: b"x" * n}, max_frame_bytes=5000)
    with pytest.raises(RemoteError, match="FrameError: a message must be at most 5000 bytes, got 600"):
        await caller.call("make", 6000, timeout_seconds=10)
    assert await caller.call("make", 10, timeout_seconds=10) == b"x" * 10


async def test_peer_that_announces_an_oversized_frame_is_cut_off(stack: Any) -> None:
    accepted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
    listener = await serve("tcp:127.0.0.1:0", accepted.set_result, wire=api_wire(), max_frame_bytes=1000)
    stack.push_async_callback(listener.close)
    big = await connect(listener.address, wire=api_wire())
    stack.push_async_callback(big.close)
    with pytest.raises(ChannelClosed):
        await big.call("anything", b"x" * 2000, timeout_seconds=10)
    reason = await asyncio.wait_for((await accepted).closed, 10)
    assert "at most 1000 bytes, the peer announced 20" in reason


async def test_large_arrays_pass_in_both_directions_at_once(make_pair: Any) -> None:
    async def echo(array: Any) -> Any:
        return array

    caller, _ = await make_pair({"echo": echo})
    arrays = [np.full(500_000, i, dtype=np.float32) for i in range(20)]
    answers = await asyncio.gather(*(caller.call("echo", array, timeout_seconds=60) for array in arrays))
    for array, answer in zip(arrays, answers, strict=True):
        np.testing.assert_array_equal(array, answer)


async def test_callers_wait_while_the_peer_does_not_read(tmp_path: Any, stack: Any) -> None:
    given_up = asyncio.Event()
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def deaf_at_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await handshake_as_listener(reader, writer, b"")
        await given_up.wait()
        received.set_result(await reader.read(-1))
        writer.close()

    server = await asyncio.start_unix_server(deaf_at_first, f"{tmp_path}/s", limit=1024)
    stack.callback(server.close)
    caller = await connect(f"unix:{tmp_path}/s", wire=api_wire())
    calls = (caller.call("x", b"x" * 100_000, timeout_seconds=0.2) for _ in range(200))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, TimeoutError) for outcome in outcomes)
    given_up.set()
    await caller.close()
    assert 0 < len(await asyncio.wait_for(received, 10)) < 4_000_000  # of 20 MB: the other calls were never sent


PEER = """
import asyncio, os, sys
from areal.infra.rpc.wire import api_wire
from areal.infra.rpc.connect import serve

async def hang():
    await asyncio.Event().wait()

async def main():
    await serve(sys.argv[1], lambda channel: channel.handlers.update(hang=hang, pid=os.getpid), wire=api_wire())
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_kill_9_of_the_peer_fails_calls_in_flight(tmp_path: Any, stack: Any) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, f"unix:{tmp_path}/s", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 30) == b"ready\n"
    channel = await connect(f"unix:{tmp_path}/s", wire=api_wire(), peer="the engine")
    stack.push_async_callback(channel.close)
    calls = [asyncio.ensure_future(channel.call("hang", timeout_seconds=60)) for _ in range(10)]
    assert await channel.call("pid", timeout_seconds=10) == process.pid
    os.kill(process.pid, signal.SIGKILL)
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, ChannelClosed)
        assert "the engine" in str(outcome)
    assert await process.wait() == -signal.SIGKILL
