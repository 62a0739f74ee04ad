"""The engines of a run as real processes: they are killed under load, replaced, given weights, and retired."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from small_runs import byte_tokenizer, make_engine

from areal.api.errors import ArealError, ProcessDied, RequestError
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.messages import EngineAddress
from areal.config.keys import ENGINE_SECRET_VARIABLE
from areal.config.rollout import GenerationHyperparameters, RolloutConfig
from areal.config.training import SchedulerConfig
from areal.engine.inference.group import EngineConnections, EngineGroup
from areal.engine.training.engine import TrainingEngine
from areal.trainer.engines import NEXT_STATES, EngineMember, Engines, EngineState
from areal.trainer.processes import Processes

pytestmark = pytest.mark.slow
AGENTS = 24
TOKENS = 400
SECONDS = 120


@pytest.fixture
def trainer(tmp_path: Path) -> TrainingEngine:
    """A random model, also saved in `tmp_path / "model"`."""
    engine = make_engine()
    engine.save(str(tmp_path / "model"))
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return engine


class Run:
    """The engines of a run as its driver has them, and as a worker of it reaches them."""

    def __init__(self, tmp_path: Path, max_restarts: int, **rollout: Any) -> None:
        self.failures: list[Exception] = []
        self.worker = EngineGroup()
        scheduler = SchedulerConfig(max_restarts=max_restarts)
        self.processes = Processes(scheduler, tmp_path / "logs", self.failures.append)
        self.connections = EngineConnections(self.worker, self.processes.secret)
        self.engines = Engines.of(
            RolloutConfig(**rollout), tmp_path / "model", self.processes, self._changed, threads=1
        )
        self._following: set[asyncio.Task[None]] = set()

    @property
    def states(self) -> list[EngineState]:
        return [member.state for member in self.engines.members]

    def pid(self, member: EngineMember) -> int:
        assert member.placement is not None
        return member.placement.pid

    async def until(self, *states: EngineState) -> None:
        async with asyncio.timeout(SECONDS):
            await self.engines.until(lambda: self.states == list(states))
            await asyncio.gather(*self._following)

    def _changed(self, engines: list[EngineAddress]) -> None:
        following = asyncio.ensure_future(self.connections.follow(engines))
        self._following.add(following)
        following.add_done_callback(self._following.discard)


@asynccontextmanager
async def running(tmp_path: Path, max_restarts: int = 3, **rollout: Any) -> AsyncIterator[Run]:
    run = Run(tmp_path, max_restarts, **{"backend": "embedded:d2", **rollout})
    try:
        await run.processes.start(run.engines.members)
        await run.until(*[EngineState.SERVING] * len(run.engines.members))
        yield run
    finally:
        await run.worker.aclose()
        await run.engines.close()
        await run.processes.close()


def request(number: int) -> ModelRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=TOKENS, seed=number)
    return ModelRequest(str(number), [5 + number, 6, 7], gconfig, session=str(number))


async def stream(group: EngineGroup, req: ModelRequest, begun: asyncio.Event) -> ModelResponse:
    tokens: list[int] = []
    async with aclosing(group.astream(req)) as chunks:
        async for chunk in chunks:
            tokens += chunk.tokens
            begun.set()
    assert chunk.response is not None
    assert tokens == chunk.response.output_tokens, "a gap, or a repeat"
    return chunk.response


async def test_agents_notice_nothing_when_one_of_two_engines_is_killed(tmp_path: Path, trainer: TrainingEngine) -> None:
    async with running(tmp_path) as run:
        group, begun = run.worker, [asyncio.Event() for _ in range(AGENTS // 2)]
        # Half of them stream. Requests alternate between the engines, so each engine has some of both kinds.
        calls = [stream(group, request(number), event) for number, event in enumerate(begun)]
        calls += [group.agenerate(request(number)) for number in range(AGENTS // 2, AGENTS)]
        running_calls = [asyncio.ensure_future(call) for call in calls]
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(event.wait() for event in begun))
        os.kill(run.pid(run.engines.members[0]), signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            answers = await asyncio.gather(*running_calls)
        assert group.moved >= AGENTS // 4
        assert group.tokens_again > group.moved * 3
        assert group.outages == 0
        for answer in answers:
            assert answer.output_len == len(answer.output_logprobs) == len(answer.output_versions) == TOKENS
        await run.until(EngineState.SERVING, EngineState.SERVING)
        assert not run.failures


async def test_replaced_engine_has_the_weights_of_the_day_before_it_serves(
    tmp_path: Path, trainer: TrainingEngine
) -> None:
    trainer.shared_dir = tmp_path
    async with running(tmp_path) as run:
        for version in (1, 2):
            trainer.flat.detach().mul_(1.01)
            trainer.version = version
            os.kill(run.pid(run.engines.members[version - 1]), signal.SIGKILL)
            await asyncio.wait_for(run.engines.publish(trainer.publish()), SECONDS)
            await run.until(EngineState.SERVING, EngineState.SERVING)
            for member in run.worker.members:
                health = await asyncio.wait_for(run.worker.health(), SECONDS)
                assert health.version == version, member
        assert [member.address.start for member in run.engines.members if member.address] == [2, 2]


async def test_engine_without_restarts_left_is_retired_and_the_last_one_ends_the_run(
    tmp_path: Path, trainer: TrainingEngine
) -> None:
    async with running(tmp_path, max_restarts=0) as run:
        first, second = run.engines.members
        os.kill(run.pid(first), signal.SIGKILL)
        await run.until(EngineState.RETIRED, EngineState.SERVING)
        assert not run.failures
        assert (await asyncio.wait_for(run.worker.agenerate(request(1)), SECONDS)).output_len == TOKENS
        os.kill(run.pid(second), signal.SIGKILL)
        await run.until(EngineState.RETIRED, EngineState.RETIRED)
        (failure,) = run.failures
        assert isinstance(failure, ProcessDied)
        assert "engine 1" in str(failure)
        assert "was killed by signal 9" in str(failure)


async def test_servers_that_run_already_serve_a_run(
    tmp_path: Path, trainer: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a-long-secret\n")
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(server_by_hand(tmp_path / "model", secret))
        monkeypatch.setenv(ENGINE_SECRET_VARIABLE, "a-long-secret")
        run = await stack.enter_async_context(running(tmp_path, backend="embedded", addresses=[address]))
        trainer.shared_dir, trainer.version = tmp_path, 7
        await asyncio.wait_for(run.engines.publish(trainer.publish()), SECONDS)
        answer = await asyncio.wait_for(run.worker.agenerate(request(1)), SECONDS)
        assert set(answer.output_versions) == {7}
        with pytest.raises(RequestError, match="only the driver of a run may call 'pause' on an engine"):
            await asyncio.wait_for(run.worker.pause(), SECONDS)
        monkeypatch.setenv(ENGINE_SECRET_VARIABLE, "another")
        with pytest.raises(ArealError, match="secret"):
            async with running(tmp_path, backend="embedded", addresses=[address]):
                pass


@asynccontextmanager
async def server_by_hand(model: Path, secret: Path) -> AsyncIterator[str]:
    """The address of an engine server that no run has started."""
    words = ["-m", "areal.engine.inference.server", str(model), "--listen", "tcp:127.0.0.1:0", "--secret-file", secret]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *map(str, words), stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), SECONDS)
        yield line.decode().split()[-1]
        process.terminate()
        assert await asyncio.wait_for(process.wait(), SECONDS) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_states_lead_from_every_state_to_the_end() -> None:
    reached = {EngineState.DEAD}
    while (more := reached | {after for state in reached for after in NEXT_STATES[state]}) != reached:
        reached = more
    assert reached == set(EngineState)
    for state in EngineState:
        if state is not EngineState.RETIRED:
            assert EngineState.DEAD in NEXT_STATES[state] or state is EngineState.DEAD
