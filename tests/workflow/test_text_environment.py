"""The thread of an episode's environment: what it makes is closed, and what hangs in it holds up nothing."""

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from areal.api.errors import WorkflowError
from areal.config.rollout import GenerationHyperparameters
from areal.workflow.text_environment import EnvironmentThread, TextEnvironmentWorkflow

HANGS = """
import asyncio, threading
from areal.utils.background import OwnThread

async def main():
    thread = OwnThread("hangs")
    asyncio.get_running_loop().call_later(0.1, asyncio.current_task().cancel)
    try:
        await thread.run(threading.Event().wait)
    finally:
        thread.end()

try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("ended")
"""


class Closing:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def workflow(tokenizer: Any) -> TextEnvironmentWorkflow:
    return TextEnvironmentWorkflow(GenerationHyperparameters(), tokenizer, 1, 1.0, 0.2)


async def test_an_environment_that_is_made_too_late_is_closed(workflow: TextEnvironmentWorkflow) -> None:
    released, made = threading.Event(), Closing()

    def make() -> Closing:
        released.wait(30)
        return made

    thread = EnvironmentThread(workflow, "test")
    with pytest.raises(WorkflowError, match=r"make of the environment must end within step_seconds=0\.2"):
        await thread.make(make)
    thread.close()
    released.set()
    assert await asyncio.to_thread(made.closed.wait, 30)


async def test_the_calls_of_an_environment_share_one_thread(workflow: TextEnvironmentWorkflow) -> None:
    thread = EnvironmentThread(workflow, "test")
    assert len({await thread.call(threading.get_ident) for _ in range(3)} - {threading.get_ident()}) == 1
    thread.close()


@pytest.mark.parametrize(("raised", "seen"), [(StopIteration(), RuntimeError), (TimeoutError("of a request"), None)])
async def test_what_an_environment_raises_is_not_taken_for_its_deadline(
    workflow: TextEnvironmentWorkflow, raised: Exception, seen: type[Exception] | None
) -> None:
    def step() -> None:
        raise raised

    thread = EnvironmentThread(workflow, "test")
    with pytest.raises(seen or type(raised)):
        await thread.call(step)
    thread.close()


@pytest.mark.slow
def test_an_environment_that_hangs_keeps_no_process_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("ended\n", 0), ended.stderr
