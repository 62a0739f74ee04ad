"""An engine of others that lost weights without an error is found out by what it computes, before anything is trained
on: on a stand-in for SGLang with a real model, whose log-probs transformers computes."""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_kinds import answer, soon
from scoring_sglang_server import ScoringServer, scoring_server
from tiny_models import byte_tokenizer, training_engine, write_model

from areal.api.engine_api import Canary, WeightUpdate
from areal.api.errors import EngineGone, WeightMismatch, WrongWeights
from areal.config.rollout import RolloutConfig
from areal.config.training import SchedulerConfig
from areal.engine.inference.canary import LEAST_LIMIT, CanaryCheck
from areal.engine.inference.group import EngineGroup
from areal.engine.inference.sglang import SglangEngine, join_sglang
from areal.engine.training.engine import TrainingEngine
from areal.trainer.canary import TOLERANCES, Canaries
from areal.trainer.engines import Engines, EngineState
from areal.trainer.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

ADAPTED = ("q_proj.weight", "v_proj.weight")
"""Layers that an adapter changes."""


class Publisher:
    """A trainer that takes steps and publishes its weights with their canary."""

    def __init__(self, dtype: str = "float32", engine: TrainingEngine | None = None) -> None:
        self.engine = engine or training_engine()
        self._canaries = Canaries(byte_tokenizer(), TOLERANCES[dtype])
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(1)

    def publish(self, rate: float = 0.0, only: Sequence[str] = ()) -> WeightUpdate:
        """After a step in which every weight, or each whose name ends in one of `only`, moves by this much."""
        with torch.no_grad():
            for name, tensor in self.engine.model.named_weights():
                if not only or name.endswith(tuple(only)):
                    tensor += rate * torch.randn(tensor.shape, generator=self._generator).sign()
        self.engine.version += 1
        return self._canaries.attached(self.engine.publish(self._dtype), self.engine)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    yield publisher
    publisher.engine.close()


@asynccontextmanager
async def joined(model: Path, dtype: torch.dtype = torch.float32) -> AsyncIterator[tuple[ScoringServer, SglangEngine]]:
    async with scoring_server(model, dtype) as server:
        engine = await join_sglang(server.url, model)
        try:
            yield server, engine
        finally:
            await engine.aclose()


async def test_engine_with_the_published_weights_passes_whatever_a_step_changed(
    tmp_path: Path, publisher: Publisher
) -> None:
    async with joined(write_model(tmp_path)) as (server, engine):
        for rate in (0.0, 0.0, 1e-9, 1e-6, 1e-3, 0.1, 0.0):
            await engine.update_weights(update := publisher.publish(rate))
            assert server.scored[-1].startswith(f"{update.version} ")
        assert len(server.scored) == 7
        assert (await answer(engine, max_new_tokens=1)).digests == {update.version: update.digest}


async def test_engine_without_canaries_in_its_updates_is_not_asked(tmp_path: Path, publisher: Publisher) -> None:
    async with joined(write_model(tmp_path)) as (server, engine):
        await engine.update_weights(replace(publisher.publish(), canary=None))
        assert server.scored == []


def half_of(publisher: Publisher) -> Callable[[str], bool]:
    names = [name for name, _ in publisher.engine.model.named_weights()]
    return lambda name: name in names[: len(names) // 2]


@pytest.mark.parametrize("rate", [1e-5, 1e-3])
async def test_stale_engine_is_named_with_the_version_that_it_still_has(
    tmp_path: Path, publisher: Publisher, rate: float
) -> None:
    async with joined(write_model(tmp_path)) as (server, engine):
        for _ in range(3):
            await engine.update_weights(publisher.publish(rate))
        server.takes = lambda name: False
        told = r"SGLang at http://\S+ must compute with the weights of version 4.* expected -\d.*, got -\d.*"
        with pytest.raises(WrongWeights, match=told + r"it is stale: the log-probs of version 3 are .* away"):
            await engine.update_weights(publisher.publish(rate))


async def test_half_loaded_file_is_found_out(tmp_path: Path, publisher: Publisher) -> None:
    async with joined(write_model(tmp_path)) as (server, engine):
        await engine.update_weights(publisher.publish())
        server.takes = half_of(publisher)
        with pytest.raises(WrongWeights, match=r"version 2.*it lost a part of them, or computes in less precision"):
            await engine.update_weights(publisher.publish(1e-3))


async def test_dropped_adapter_is_found_out_at_its_first_step(tmp_path: Path, publisher: Publisher) -> None:
    """An adapter that has not been trained adds nothing, so before its first step there is nothing to find."""
    async with joined(write_model(tmp_path)) as (server, engine):
        server.takes = lambda name: not name.endswith(ADAPTED)
        await engine.update_weights(publisher.publish())
        with pytest.raises(WrongWeights, match=r"version 2.*it is stale: the log-probs of version 1"):
            await engine.update_weights(publisher.publish(1e-3, only=ADAPTED))


async def test_engine_that_joins_with_the_weights_it_started_with_is_found_out(
    tmp_path: Path, publisher: Publisher
) -> None:
    publisher.publish()
    publisher.publish(0.05)
    async with joined(write_model(tmp_path)) as (server, engine):
        server.takes = lambda name: False
        with pytest.raises(WrongWeights, match=r"version 3.*it is stale: the log-probs of version 1"):
            await engine.update_weights(publisher.publish(0.05))


async def test_bfloat16_passes_step_after_step_and_lost_weights_do_not(tmp_path: Path) -> None:
    publisher = Publisher("bfloat16")
    async with joined(write_model(tmp_path), torch.bfloat16) as (server, engine):
        for rate in (0.0, 1e-6, 1e-4, 1e-3, 1e-3, 1e-3):
            await engine.update_weights(publisher.publish(rate))
        assert engine._canaries.noise is not None
        assert engine._canaries.noise > LEAST_LIMIT
        server.takes = lambda name: False
        with pytest.raises(WrongWeights, match="it is stale"):
            await engine.update_weights(publisher.publish(0.1))  # far more than what bfloat16 explains
    publisher.engine.close()


async def test_less_precision_than_the_run_says_is_refused_with_the_remedy(
    tmp_path: Path, publisher: Publisher
) -> None:
    async with joined(write_model(tmp_path, num_layers=8), torch.bfloat16) as (_, engine):
        deep = Publisher(engine=training_engine(replace(publisher.engine.decoder.architecture, num_layers=8)))
        update = deep.publish()
        assert update.canary is not None
        strict = replace(update, canary=replace(update.canary, tolerance=1e-3))
        with pytest.raises(WrongWeights, match=r"set that to what it computes in"):
            await engine.update_weights(strict)
        deep.engine.close()


async def test_paused_engine_is_asked_when_it_goes_on(tmp_path: Path, publisher: Publisher) -> None:
    async with joined(write_model(tmp_path)) as (server, engine):
        await engine.update_weights(publisher.publish())
        await engine.pause()
        server.takes = lambda name: False
        await engine.update_weights(publisher.publish(1e-3))
        with pytest.raises(WrongWeights, match="version 2"):
            await engine.resume()


async def test_one_wrong_engine_among_others_fails_the_publication_by_name(
    tmp_path: Path, publisher: Publisher
) -> None:
    model = write_model(tmp_path)
    async with joined(model) as (_, right), joined(model) as (broken, wrong):
        group = EngineGroup()
        group.add("engine 0 #1", right)
        group.add("engine 1 #1", wrong)
        await group.update_weights(publisher.publish())
        broken.takes = lambda name: False
        with pytest.raises(WrongWeights, match=r"engine 1 #1: SGLang at .* version 2"):
            await group.update_weights(publisher.publish(1e-3))


async def test_requests_do_not_wait_for_the_verdict(tmp_path: Path, publisher: Publisher) -> None:
    async with joined(write_model(tmp_path)) as (server, engine):
        asked, verdict, score = asyncio.Event(), asyncio.Event(), engine.score

        async def held(tokens: Sequence[int]) -> list[float]:
            asked.set()
            await verdict.wait()
            return await score(tokens)

        engine.score = held  # type: ignore[method-assign]
        update = asyncio.ensure_future(engine.update_weights(publisher.publish()))
        await soon(asked.wait())
        assert (await answer(engine, max_new_tokens=1)).output_versions == [1]
        assert (server.scored, update.done()) == ([], False)
        verdict.set()
        await soon(update)


async def test_server_that_was_started_again_by_others_ends_its_engine(tmp_path: Path, publisher: Publisher) -> None:
    """It has the weights of its files then, and calls them by no version."""
    async with joined(write_model(tmp_path)) as (server, engine):
        failed = asyncio.Event()
        engine.on_failure = failed.set
        await engine.update_weights(publisher.publish())
        server.restart()
        with pytest.raises(EngineGone, match="was started again, without the weights of version 1"):
            await answer(engine, max_new_tokens=1)
        await soon(failed.wait())


# From here: as the driver of a run has its engines.


@asynccontextmanager
async def run_on(
    server: ScoringServer, model: Path, logs: Path
) -> AsyncIterator[tuple[Engines, asyncio.Future[Exception]]]:
    """A run with one engine process on the server; and why it has to end."""
    failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    processes = Processes(SchedulerConfig(), logs, failure.set_result)
    rollout = RolloutConfig(backend="sglang", addresses=[server.url])
    engines = Engines.of(rollout, model, processes, lambda serving: None, threads=1)
    try:
        await soon(processes.start(engines.members))
        yield engines, failure
    finally:
        await engines.close()
        await processes.close()


async def test_stale_engine_fails_the_publication_and_the_run(tmp_path: Path, publisher: Publisher) -> None:
    model = write_model(tmp_path / "model")
    async with scoring_server(model) as server, run_on(server, model, tmp_path) as (engines, _):
        await soon(engines.publish(publisher.publish()))
        server.takes = lambda name: False
        with pytest.raises(WrongWeights, match=r"engine #1: SGLang at http://\S+ must .* of version 2"):
            await soon(engines.publish(publisher.publish(1e-3)))


async def test_engine_that_comes_back_without_the_weights_of_the_day_ends_the_run(
    tmp_path: Path, publisher: Publisher
) -> None:
    model = write_model(tmp_path / "model")
    async with scoring_server(model) as server, run_on(server, model, tmp_path) as (engines, failure):
        await soon(engines.publish(publisher.publish()))
        await soon(engines.publish(publisher.publish(0.1)))
        (member,) = engines.members
        assert member.placement is not None
        server.restart()
        os.kill(member.placement.pid, signal.SIGKILL)
        await soon(engines.until(lambda: member.state is EngineState.CATCHING_UP))
        await soon(engines.until(lambda: member.state is EngineState.SERVING))  # it was given them
        server.restart()
        server.takes = lambda name: False
        os.kill(member.placement.pid, signal.SIGKILL)
        why = await soon(failure)
        assert isinstance(why, WrongWeights)
        assert str(why).startswith("engine #3: SGLang at http://")
        assert "it is stale: the log-probs of version 1" in str(why)


# From here: the criterion alone.


def update_of(*logprobs: float, tolerance: float = 0.05, earlier: Sequence[float] = ()) -> WeightUpdate:
    canary = Canary(tuple(range(len(logprobs) + 1)), logprobs, tolerance, {1: tuple(earlier)} if earlier else {})
    return WeightUpdate(2, "two", "", canary=canary)


async def test_limit_is_the_tolerance_first_and_then_what_the_engine_has_shown() -> None:
    check, update = CanaryCheck(), update_of(-1.0, -2.0, -3.0)
    check.check("it", update, [-1.001, -2.001, -3.001])
    check.check("it", update, [-1.005, -2.005, -3.005])
    with pytest.raises(WrongWeights, match=r"off by 0\.02, where arithmetic explains 0\.008"):
        check.check("it", update, [-1.02, -2.02, -3.02])
    with pytest.raises(WrongWeights, match=r"off by 0\.06, where arithmetic explains 0\.05"):
        CanaryCheck().check("it", update, [-1.06, -2.06, -3.06])


async def test_a_single_token_far_off_is_no_mismatch() -> None:
    """As in a mixture of experts, where one chosen otherwise moves its token far."""
    check, update = CanaryCheck(), update_of(-1.0, -2.0, -3.0)
    check.check("it", update, [-1.0, -2.0, -9.0])
    check.check("it", update, [-4.0, -2.0, -3.0])


@pytest.mark.parametrize("found", [[-1.0, math.nan], [-1.0, -math.inf], [-1.0], []])
async def test_what_is_no_answer_is_a_mismatch(found: list[float]) -> None:
    with pytest.raises(WeightMismatch, match="off by inf"):
        CanaryCheck().check("it", update_of(-1.0, -2.0), found)
