"""The end of the one server, so these are the last tests."""

import asyncio
import os
import signal

import pytest
from engine_kinds import begin, soon
from vllm_engines import VllmEngines

from areal.api.errors import EngineGone

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_only_this_user_can_reach_the_server(engines: VllmEngines) -> None:
    assert engines.vllm.socket.parent.stat().st_mode & 0o777 == 0o700


async def test_a_killed_server_ends_its_engine_process_with_the_cause(engines: VllmEngines) -> None:
    engine = await engines.open()
    tasks = await begin(engine, 2, max_new_tokens=2000)
    os.kill(engines.vllm.server_pid, signal.SIGKILL)
    for outcome in await soon(asyncio.gather(*tasks, return_exceptions=True)):
        assert isinstance(outcome, EngineGone)
    assert await asyncio.wait_for(engines.vllm.process.wait(), 60) == 1
    assert any("vLLM ended with code -9" in line for line in engines.vllm.output)
    assert not list(engines.vllm.place.glob("areal-vllm-*"))
    await engine.aclose()
