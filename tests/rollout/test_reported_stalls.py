"""What the driver reports of workers whose event loops were blocked."""

import os
from dataclasses import replace

from fake_workers import group

from areal.api.messages import GroupResult, GroupTask, Stall
from areal.infra.rpc.wire import api_wire
from areal.rollout.dispatch import Dispatch, GroupWorker

STALL = Stall("mine.py:41", "run", "time.sleep(3)", "await asyncio.sleep(...)", "mine.Agent", 7, 0.5, process=-1)


class BlockedWorker(GroupWorker):
    """Each of its groups comes with a stall."""

    def __init__(self, stall: Stall) -> None:
        self._stall = stall

    async def run_group(self, task: GroupTask) -> GroupResult:
        return replace(group(task.task_id), stalls=[self._stall])


async def test_first_stalls_of_a_line_are_logged_and_all_are_counted(rollout_log: list[str]) -> None:
    dispatch = Dispatch([BlockedWorker(STALL)], None)
    for number in range(5):
        await dispatch.send(GroupTask(number, b"", 1))
    assert len(rollout_log) == 3
    assert rollout_log[0].startswith(
        "mine.Agent (task 7) blocked the event loop for 0.5 s at mine.py:41 in run: time.sleep(3)"
    )
    assert dispatch.stalls.summary() == [
        "mine.py:41 blocked the event loop 5 times, 2.5 s in all; use await asyncio.sleep(...)"
    ]


async def test_stall_of_this_process_was_logged_when_it_happened(rollout_log: list[str]) -> None:
    dispatch = Dispatch([BlockedWorker(replace(STALL, process=os.getpid()))], None)
    await dispatch.send(GroupTask(0, b"", 1))
    assert rollout_log == []
    assert len(dispatch.stalls.summary()) == 1


def test_stall_travels_with_its_group() -> None:
    wire = api_wire()
    sent = replace(group(3), stalls=[STALL])
    assert wire.unpack(wire.pack(sent)).stalls == [STALL]
