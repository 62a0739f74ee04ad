"""The SGLang adapter, against a stand-in that answers SGLang's routes (fake_sglang_server.py): SGLang was not run."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import test_conformance
import test_streaming
from engine_kinds import LONG, answer, ask, begin, soon, until
from process_end import ended_within
from tiny_models import training_engine, write_model

from areal.api.engine_api import InferenceEngine, WeightUpdate
from areal.api.errors import EngineError, EngineGone, RequestError, WeightMismatch
from areal.api.io_struct import Grammar
from areal.engine.inference.http_engine import initial_weights
from areal.engine.inference.http_server import HttpServer
from areal.engine.inference.sglang import SglangEngine, join_sglang, open_sglang
from areal.utils.process_pool.descendants import children_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class FakeSglangEngines:
    """Opens engines on one stand-in server, and publishes weights for them."""

    of_others = True

    def __init__(self, owner: SglangEngine, model: Path) -> None:
        self.owner, self.model = owner, model
        self.trainer = training_engine()

    async def open(self) -> SglangEngine:
        engine = await SglangEngine.join(HttpServer("SGLang", self.owner.server.address), self.model)
        await engine.server.post("/continue_generation", {})
        return engine

    def publish(self) -> WeightUpdate:
        self.trainer.flat *= 1.01
        self.trainer.version += 1
        return self.trainer.publish()


@pytest.fixture(scope="module")
def fake_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """`python -m sglang.launch_server` starts the stand-in."""
    package = tmp_path_factory.mktemp("stand-in") / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("fake_sglang_server.py"), package / "launch_server.py")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PYTHONPATH", str(package.parent))
        yield environ


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(fake_sglang: pytest.MonkeyPatch, model: Path) -> AsyncIterator[FakeSglangEngines]:
    owner = await open_sglang(model, timeout_seconds=60)
    engines = FakeSglangEngines(owner, model)
    yield engines
    engines.trainer.close()
    await owner.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(engines: FakeSglangEngines) -> AsyncIterator[InferenceEngine]:
    engine = await engines.open()
    yield engine
    await engine.aclose()


REFUSED = {"test_no_stop_token_is_drawn_before_min_new_tokens"}
"""What SGLang cannot honour."""
for module in (test_conformance, test_streaming):
    for name, test in vars(module).items():
        if name.startswith("test_") and name not in REFUSED:
            globals()[name] = test


async def test_tokens_drawn_before_a_swap_are_not_drawn_again(engines: FakeSglangEngines) -> None:
    engine = await engines.open()
    await engine.update_weights(old := engines.publish())
    async with asyncio.timeout(60), aclosing(engine.astream(ask(max_new_tokens=LONG, seed=1))) as chunks:
        first = await anext(chunks)
        await engine.update_weights(new := engines.publish())
        rest = [chunk async for chunk in chunks]
    response = rest[-1].response
    assert response is not None
    streamed = first.tokens + [token for chunk in rest for token in chunk.tokens]
    assert streamed == response.output_tokens
    assert len(streamed) == LONG
    assert set(response.output_versions) == {old.version, new.version}
    await engine.aclose()


async def test_events_with_all_tokens_of_a_call_are_understood(fake_sglang: pytest.MonkeyPatch, model: Path) -> None:
    fake_sglang.setenv("AREAL_FAKE_SGLANG", "cumulative")
    engine = await open_sglang(model, timeout_seconds=60)
    fake_sglang.delenv("AREAL_FAKE_SGLANG")
    response = await answer(engine, max_new_tokens=30, greedy=True)
    assert response.output_len == 30
    assert response.output_logprobs == [-0.5 - token / 1000 for token in response.output_tokens]
    await engine.aclose()


@pytest.mark.parametrize(
    ("settings", "changes", "complaint"),
    [
        ({"min_new_tokens": 2, "stop_token_ids": [5]}, {}, "min_new_tokens only without stop_token_ids, got 2"),
        ({}, {"grammar": Grammar("lark", 'start: "a"', "the tool choice")}, "the tool choice cannot be honoured"),
        ({}, {"images": [b"png"]}, "images are not sent to SGLang, got 1"),
    ],
)
async def test_what_sglang_cannot_honour_is_refused_by_name(
    engine: InferenceEngine, settings: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        await soon(engine.agenerate(replace(ask(**settings), **changes)))


async def test_a_refused_or_failed_request_costs_no_other(engine: InferenceEngine) -> None:
    (kept,) = await begin(engine, max_new_tokens=LONG)
    with pytest.raises(RequestError, match="SGLang refuses a request with 400: it cannot be served"):
        await answer(engine, [250])
    with pytest.raises(EngineError, match="500: it went wrong") as failure:
        await answer(engine, [251])
    assert not isinstance(failure.value, RequestError | EngineGone)
    assert (await soon(kept)).output_len == LONG


async def test_a_request_that_a_dying_server_fails_may_go_on_elsewhere(
    fake_sglang: pytest.MonkeyPatch, model: Path
) -> None:
    engine = await open_sglang(model, timeout_seconds=60)
    with pytest.raises(EngineGone, match=r"the scheduler died; SGLang refuses /health with 503"):
        await answer(engine, [252])
    await engine.aclose()


async def test_weights_of_another_digest_are_refused_and_the_old_ones_serve_on(engines: FakeSglangEngines) -> None:
    engine = await engines.open()
    await engine.update_weights(good := engines.publish())
    wrong = replace(engines.publish(), digest="0" * 32)
    with pytest.raises(WeightMismatch, match="must have the digest 0000"):
        await engine.update_weights(wrong)
    with pytest.raises(WeightMismatch, match=r"must be a safetensors file '/nowhere/model.safetensors'"):
        await engine.update_weights(replace(good, path="/nowhere"))
    with pytest.raises(WeightMismatch, match="SGLang is given whole models, got an update of layout 'adapter'"):
        await engine.update_weights(replace(good, layout="adapter"))
    assert (await answer(engine)).digests == {good.version: good.digest}
    await engine.aclose()


async def test_a_server_that_dies_fails_its_requests_with_the_end_of_its_output(
    fake_sglang: pytest.MonkeyPatch, model: Path
) -> None:
    engine = await open_sglang(model, timeout_seconds=60)
    failed = asyncio.Event()
    engine.on_failure = failed.set
    tasks = await begin(engine, 3, max_new_tokens=3000)
    assert engine.server.process is not None
    (worker,) = children_of(engine.server.process.pid)
    os.kill(engine.server.process.pid, signal.SIGKILL)
    outcomes = await soon(asyncio.gather(*tasks, return_exceptions=True))
    assert all(isinstance(outcome, EngineGone) for outcome in outcomes)
    await soon(failed.wait())
    assert "SGLang ended with code -9" in str(engine.failure)
    with pytest.raises(EngineGone):
        await answer(engine)
    await engine.aclose()
    assert ended_within(worker, 10.0)


async def test_a_server_that_runs_already_is_used_until_it_ends(fake_sglang: pytest.MonkeyPatch, model: Path) -> None:
    owner = await open_sglang(model, timeout_seconds=60)
    await owner.pause()  # its user ended in the middle of a change of weights
    engine = await join_sglang(owner.server.address, model)
    failed = asyncio.Event()
    engine.on_failure = failed.set
    assert (await answer(engine)).output_len == 12
    assert owner.server.process is not None
    (call,) = await begin(engine, max_new_tokens=3000)
    os.kill(owner.server.process.pid, signal.SIGKILL)
    with pytest.raises(EngineGone, match=r"SGLang at http://127\.0\.0\.1:.* cannot be reached"):
        await soon(call)
    await soon(failed.wait())
    assert "cannot be reached" in str(engine.failure)
    await engine.aclose()
    with pytest.raises(EngineGone, match="cannot be reached"):
        await join_sglang(owner.server.address, model)
    await owner.aclose()


async def test_cpu_seconds_are_those_of_the_server_too(engines: FakeSglangEngines, engine: InferenceEngine) -> None:
    used = engines.owner.cpu_seconds()
    await answer(engines.owner)
    own = time.process_time()
    assert engines.owner.cpu_seconds() > max(used, own)
    assert isinstance(engine, SglangEngine)
    assert engine.cpu_seconds() < engines.owner.cpu_seconds()  # the server is not its own


async def test_a_server_that_dies_while_it_starts_is_reported_with_its_last_words(
    fake_sglang: pytest.MonkeyPatch, model: Path
) -> None:
    fake_sglang.setenv("AREAL_FAKE_SGLANG", "dies")
    with pytest.raises(EngineError, match=r"(?s)ended with code 1 while it started:.*CUDA out of memory"):
        await open_sglang(model, timeout_seconds=60)
    fake_sglang.delenv("AREAL_FAKE_SGLANG")


async def test_a_server_that_never_answers_is_given_up_at_the_deadline(
    fake_sglang: pytest.MonkeyPatch, model: Path
) -> None:
    fake_sglang.setenv("AREAL_FAKE_SGLANG", "deaf")
    with pytest.raises(EngineError, match="must be ready within 2 s, got no answer"):
        await open_sglang(model, timeout_seconds=2)
    fake_sglang.delenv("AREAL_FAKE_SGLANG")


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
async def test_a_server_that_still_starts_ends_with_its_engine_process(
    fake_sglang: pytest.MonkeyPatch, model: Path, tmp_path: Path, sign: signal.Signals
) -> None:
    words = [str(model), "--backend", "sglang", "--listen", f"unix:{tmp_path}/engine"]
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "areal.engine.inference.server", *words),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "AREAL_FAKE_SGLANG": "deaf", "PYTHONPATH": ":".join([os.environ["PYTHONPATH"], *sys.path])},
    )
    assert owner.stderr is not None
    assert b"answers nobody" in await asyncio.wait_for(owner.stderr.readuntil(b"nobody"), 60)
    (server,) = children_of(owner.pid)
    owner.send_signal(sign)
    assert await asyncio.wait_for(owner.wait(), 60) == (0 if sign is signal.SIGTERM else -sign)
    assert ended_within(server, 10.0)


async def test_an_interpreter_that_does_not_exist_is_named(model: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot be started with '/no/such/python'.*set rollout.python"):
        await open_sglang(model, python="/no/such/python")


async def test_a_failed_load_ends_the_engine_rather_than_leave_its_weights_unknown(
    fake_sglang: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    engine = await open_sglang(model, timeout_seconds=60)
    shutil.copy(model / "model.safetensors", tmp_path / "other-name.safetensors")
    update = replace(initial_weights(tmp_path), version=1)
    with pytest.raises(EngineError, match="Failed to load"):
        await engine.update_weights(update)
    assert "a change of weights to version 1 was not completed" in str(engine.failure)
    with pytest.raises(EngineGone):
        await answer(engine)
    await engine.aclose()


async def test_no_request_stays_behind_when_its_caller_goes(engine: InferenceEngine) -> None:
    tasks = await begin(engine, 2, max_new_tokens=3000)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(engine, running=0, waiting=0)
