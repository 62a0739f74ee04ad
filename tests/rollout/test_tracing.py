"""OpenTelemetry spans of episodes, made by its real SDK; run by `make test-otel`."""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import crashing_agents
import httpx
import pytest
from sdk_call import DATA, MAX_POSITIONS, chat

from areal.api.errors import ConfigError
from areal.api.messages import GroupTask
from areal.config.rollout import AgentConfig, ProxyConfig
from areal.engine.inference.fake import FakeEngine
from areal.infra import tracing
from areal.infra.tracing import Tracing
from areal.proxy import ArealOpenAI, Proxy
from areal.rollout.runners.agent import AgentRunner
from areal.rollout.runners.workflow import WorkflowRunner
from areal.rollout.worker import RolloutWorker
from areal.workflow import RLVRWorkflow

pytest.importorskip("opentelemetry.sdk", reason="make test-otel runs these, with OpenTelemetry")

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


@pytest.fixture
def made() -> InMemorySpanExporter:
    """Where the spans are kept."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(made: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    return provider


@pytest.fixture
def run_agent(proxy: Proxy, engine: FakeEngine, gconfig: Any, provider: TracerProvider) -> Any:
    """Run a group of an agent's episodes, traced."""

    async def run(agent: Any, n_samples: int = 1, *, seconds: float = 60, **options: Any) -> Any:
        runner = AgentRunner(agent, proxy, AgentConfig(), gconfig)
        own = Tracing(provider, owned=False)
        worker = RolloutWorker({False: runner, True: runner}, proxy, engine, seconds, tracing=own)
        return await worker.run_group(task(n_samples, **options))

    return run


def task(n_samples: int = 1, **options: Any) -> GroupTask:
    return GroupTask(7, pickle.dumps(DATA), n_samples, **options)


def by_name(made: InMemorySpanExporter) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for span in made.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


async def test_episode_holds_its_calls_and_its_reward(run_agent: Any, made: InMemorySpanExporter) -> None:
    async def asker(data: Any, **kwargs: Any) -> float:
        first = await chat(kwargs, data["messages"], temperature=0.5, max_tokens=16)
        messages = [*data["messages"], first.choices[0].message.model_dump(), {"role": "user", "content": "hello"}]
        await chat(kwargs, messages)
        return 0.75

    await run_agent(asker, is_eval=True)
    spans = by_name(made)
    ((episode,), calls) = (next(iter(v for k, v in spans.items() if k.startswith("invoke_agent"))), spans["chat any"])
    assert len(made.get_finished_spans()) == 3
    about = dict(episode.attributes)
    assert about["gen_ai.operation.name"] == "invoke_agent"
    assert about["gen_ai.agent.name"] in episode.name
    assert (about["areal.task.id"], about["areal.sample"], about["areal.evaluation"]) == (7, 0, True)
    assert about["areal.outcome"] == "accepted"
    assert episode.status.status_code is StatusCode.UNSET
    (reward,) = episode.events
    assert (reward.name, dict(reward.attributes)) == (
        "gen_ai.evaluation.result",
        {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.75},
    )
    for call in calls:
        assert (call.parent.span_id, call.context.trace_id) == (episode.context.span_id, episode.context.trace_id)
        assert call.kind is SpanKind.CLIENT
        assert episode.start_time <= call.start_time <= call.end_time <= episode.end_time
    first = dict(calls[0].attributes)
    assert first["gen_ai.operation.name"] == "chat"
    assert first["gen_ai.provider.name"] == "areal"
    assert (first["gen_ai.request.model"], first["gen_ai.response.model"]) == ("any", "any")
    assert (first["gen_ai.request.temperature"], first["gen_ai.request.max_tokens"]) == (0.5, 16)
    assert first["gen_ai.response.finish_reasons"] == ("stop",)
    assert first["gen_ai.response.id"].startswith("chatcmpl-")
    assert first["areal.weights.versions"] == (0,)
    assert first["gen_ai.conversation.id"] == calls[1].attributes["gen_ai.conversation.id"]
    assert "gen_ai.request.temperature" not in calls[1].attributes
    for kind in ("input", "output"):
        each = [call.attributes[f"gen_ai.usage.{kind}_tokens"] for call in calls]
        assert min(each) > 0
        assert about[f"gen_ai.usage.{kind}_tokens"] == sum(each)


async def test_no_text_of_a_conversation_is_in_a_span(run_agent: Any, made: InMemorySpanExporter) -> None:
    async def asker(data: Any, **kwargs: Any) -> float:
        await chat(kwargs, [{"role": "user", "content": "a secret of mine"}])
        return 1.0

    await run_agent(asker)
    told = json.dumps([span.to_json() for span in made.get_finished_spans()])
    assert "secret" not in told
    assert "1259" not in told


async def test_tools_are_seen_between_the_call_that_asks_and_the_one_that_brings_the_result(
    tokenizer: Any, gconfig: Any, provider: TracerProvider, made: InMemorySpanExporter
) -> None:
    said = ['<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>', "7", "8"]

    def script(ids: Sequence[int]) -> Sequence[int]:
        return [*tokenizer.encode(said.pop(0)), tokenizer.eos_token_id]

    engine = FakeEngine(vocab_size=len(tokenizer), max_positions=MAX_POSITIONS, script=script, tokenizer=tokenizer)

    async def agent(data: Any, **kwargs: Any) -> float:
        first = await chat(kwargs, data["messages"], tools=[ADD])
        (call,) = first.choices[0].message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        messages = [*data["messages"], first.choices[0].message.model_dump(exclude_none=True), result]
        last = await chat(kwargs, messages, tools=[ADD])
        messages += [last.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and now?"}]
        await chat(kwargs, messages, tools=[ADD])  # the result comes again, and the tool did not run again
        return 1.0

    proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=MAX_POSITIONS)
    await proxy.start()
    runner = AgentRunner(agent, proxy, AgentConfig(), gconfig)
    worker = RolloutWorker({False: runner}, proxy, engine, 60, tracing=Tracing(provider, owned=False))
    result = await worker.run_group(task())
    await worker.aclose()
    assert result.rejections == []
    spans = by_name(made)
    (tool,), calls = spans["execute_tool add"], spans["chat any"]
    assert tool.attributes["gen_ai.operation.name"] == "execute_tool"
    assert tool.attributes["gen_ai.tool.name"] == "add"
    assert tool.attributes["gen_ai.tool.call.id"]
    assert tool.parent.span_id == calls[0].parent.span_id
    assert calls[0].end_time <= tool.start_time <= tool.end_time <= calls[1].start_time
    assert calls[0].attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)


async def test_streams_tell_when_they_began_and_retries_make_no_second_span(
    run_agent: Any, made: InMemorySpanExporter
) -> None:
    async def agent(data: Any, **kwargs: Any) -> float:
        async for _ in await chat(kwargs, data["messages"], stream=True):
            pass
        headers = {"idempotency-key": "one"}
        first = await chat(kwargs, data["messages"], extra_headers=headers)
        again = await chat(kwargs, data["messages"], extra_headers=headers)
        assert first.id == again.id
        return 1.0

    assert (await run_agent(agent)).rejections == []
    stream, plain = by_name(made)["chat any"]
    assert stream.attributes["gen_ai.request.stream"] is True
    assert 0 <= stream.attributes["gen_ai.response.time_to_first_chunk"] < 60
    assert "gen_ai.response.time_to_first_chunk" not in plain.attributes


async def test_failures_are_errors_with_a_type(run_agent: Any, made: InMemorySpanExporter) -> None:
    async def agent(data: Any, **kwargs: Any) -> float:
        await chat(kwargs, [{"role": "user", "content": "5291 " * MAX_POSITIONS}])
        return 1.0

    assert len((await run_agent(agent, 2)).rejections) == 2
    spans = by_name(made)
    calls = spans.pop("chat any")
    ((_, episodes),) = spans.items()
    assert len(calls) == len(episodes) == 2
    for call, episode in zip(calls, episodes, strict=True):
        assert call.attributes["error.type"] == "context_length_exceeded"
        assert episode.attributes["error.type"] == episode.attributes["areal.outcome"] == "agent_error"
        for span in (call, episode):
            assert span.status.status_code is StatusCode.ERROR
        assert "raised BadRequestError" in episode.status.description
        assert episode.events == ()


async def test_half_a_surrogate_pair_loses_no_span(run_agent: Any, made: InMemorySpanExporter) -> None:
    async def agent(data: Any, **kwargs: Any) -> float:
        trace = tracing.current()
        assert trace is not None
        call = trace.begin_call("chat", "m\ud800", "s", (), {"gen_ai.request.stop_sequences": ["\ud800"]})
        call.answered(1, 1, ["stop"], [0], [("id", "na\ud800me" * 100)])
        trace.begin_call("chat", "m", "s", ["id"], {}).failed("kind", "why \ud800")
        raise ValueError("it wrote \ud800")

    await run_agent(agent)
    spans = made.get_finished_spans()
    assert len(encode_spans(spans).resource_spans[0].scope_spans[0].spans) == len(spans) == 4
    (tool,) = [span for span in spans if span.name.startswith("execute_tool")]
    assert len(tool.attributes["gen_ai.tool.name"]) <= tracing.MOST_NAME


def test_a_variable_that_opentelemetry_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with pytest.raises(ConfigError, match=r"max_queue_size must be a positive integer.*; change the variable OTEL_"):
        Tracing.start()


def test_nothing_waits_for_spans_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.01)
    sent, ended = threading.Event(), threading.Event()

    class Unreachable(TracerProvider):
        def shutdown(self) -> None:
            sent.wait(30)
            ended.set()

    asyncio.run(Tracing(Unreachable(shutdown_on_exit=False), owned=True).aclose())
    assert not ended.is_set()
    sent.set()


async def test_episode_that_its_agent_filters_is_no_error(run_agent: Any, made: InMemorySpanExporter) -> None:
    async def agent(data: Any, **kwargs: Any) -> None:
        await chat(kwargs, data["messages"])

    await run_agent(agent)
    episode = made.get_finished_spans()[-1]
    assert episode.attributes["areal.outcome"] == "filtered"
    assert "error.type" not in episode.attributes
    assert episode.status.status_code is StatusCode.UNSET


async def test_calls_that_an_episode_leaves_behind_end_as_cancelled(
    tokenizer: Any, gconfig: Any, provider: TracerProvider, made: InMemorySpanExporter
) -> None:
    engine = FakeEngine(vocab_size=len(tokenizer), max_positions=MAX_POSITIONS, tokenizer=tokenizer)
    await engine.pause()
    proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=MAX_POSITIONS)
    await proxy.start()

    async def agent(data: Any, **kwargs: Any) -> float:
        await chat(kwargs, data["messages"])
        return 1.0

    runner = AgentRunner(agent, proxy, AgentConfig(), gconfig)
    worker = RolloutWorker({False: runner}, proxy, engine, 0.5, tracing=Tracing(provider, owned=False))
    await worker.run_group(task())
    await worker.aclose()
    call, episode = made.get_finished_spans()
    assert (call.name, call.attributes["error.type"]) == ("chat any", "cancelled")
    assert episode.attributes["error.type"] == "timeout"


async def test_what_an_agent_traces_itself_is_inside_its_episode(
    run_agent: Any, provider: TracerProvider, made: InMemorySpanExporter
) -> None:
    own = provider.get_tracer("mine")

    async def agent(data: Any, **kwargs: Any) -> float:
        with own.start_as_current_span("look it up"):
            await asyncio.to_thread(lambda: own.start_span("in a thread").end())
        await chat(kwargs, data["messages"])
        return 1.0

    await run_agent(agent, 3)
    spans = by_name(made)
    ((_, episodes),) = [(name, found) for name, found in spans.items() if name.startswith("invoke_agent")]
    assert sorted(span.parent.span_id for span in spans["look it up"]) == sorted(
        episode.context.span_id for episode in episodes
    )
    assert {span.context.trace_id for span in spans["in a thread"]} == {each.context.trace_id for each in episodes}


class ClientWorkflow:
    """A workflow that talks by the direct client."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        async with ArealOpenAI(engine, self.tokenizer) as client:
            await client.chat.completions.create(model="any", messages=data["messages"])
            client.set_last_reward(1.0)
            return client.export_interactions()


@pytest.mark.parametrize("kind", ["tokens", "direct client"])
async def test_calls_of_a_workflow_have_one_span_each(
    kind: str, proxy: Proxy, engine: FakeEngine, tokenizer: Any, gconfig: Any, provider: Any, made: InMemorySpanExporter
) -> None:
    if kind == "tokens":
        workflow: Any = RLVRWorkflow(lambda *args, **data: 1.0, gconfig, tokenizer)
    else:
        workflow = ClientWorkflow(tokenizer)
    runner = WorkflowRunner(workflow, engine, tokenizer)
    worker = RolloutWorker({False: runner}, proxy, engine, 60, tracing=Tracing(provider, owned=False))
    result = await worker.run_group(task(2))
    assert (len(result.episodes), result.rejections) == (2, [])
    spans = by_name(made)
    calls = spans["text_completion" if kind == "tokens" else "chat any"]
    assert len(made.get_finished_spans()) == 4
    assert len(calls) == 2
    for call in calls:
        assert call.attributes["gen_ai.usage.output_tokens"] > 0
        assert call.attributes["gen_ai.response.finish_reasons"] == ("stop",)


async def test_agents_in_processes_and_outside_are_traced_too(
    start_worker: Any, provider: TracerProvider, made: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tracing, "start", classmethod(lambda cls: cls(provider, owned=False)))
    away = await start_worker(
        crashing_agents.Telling, tracing=True, agent=AgentConfig(mode="subproc", subproc_max_workers=1)
    )
    assert (await away.run_group(task())).rejections == []
    assert [span.name.split()[0] for span in made.get_finished_spans()] == ["chat", "invoke_agent"]
    made.clear()
    online = await start_worker(
        "areal.rollout.runners.online.OutsideAgent",
        tracing=True,
        agent=AgentConfig(mode="online"),
        proxy=ProxyConfig(admin_key="the-admin-key-of-this-test"),
    )
    group = asyncio.create_task(online.run_group(task()))
    headers = {"authorization": "Bearer the-admin-key-of-this-test"}
    async with httpx.AsyncClient(trust_env=False, headers=headers) as http, asyncio.timeout(30):
        while (answer := await http.post(f"{online.proxy.origin}/sessions")).status_code == 429:
            pass
        visit = answer.json()
        key = {"authorization": f"Bearer {visit['api_key']}"}
        body = {"messages": DATA["messages"]}
        await http.post(f"{visit['base_url']}/chat/completions", json=body, headers=key)
        await http.post(f"{online.proxy.origin}/sessions/{visit['session_id']}/reward", json={"reward": 1})
        await http.post(f"{online.proxy.origin}/sessions/{visit['session_id']}/end")
        assert (await group).rejections == []
    call, episode = made.get_finished_spans()
    assert (call.name, call.parent.span_id) == ("chat default", episode.context.span_id)


def test_collector_that_is_not_there_holds_up_nothing() -> None:
    code = """
import asyncio
from areal.api.errors import RejectReason
from areal.api.messages import Rejection
from areal.infra.tracing import Tracing

async def played():
    return Rejection(RejectReason.FILTERED, ""), None

async def main():
    tracing = Tracing.start()
    await tracing.episode(played(), agent="mine", task_id=1, sample=0, is_eval=False)
    await tracing.aclose()

asyncio.run(main())
"""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


class Collector(BaseHTTPRequestHandler):
    """What an OTLP collector does, as far as a test needs it."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.mark.timeout(400)
def test_run_sends_its_spans_where_the_environment_says(tmp_path: Path) -> None:
    import gzip

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    Collector.bodies = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    words = ["total_train_steps=1", "gconfig.n_samples=2", "train_dataset.batch_size=2", "valid_dataset.size=4"]
    words += ["evaluator.greedy=false", "saver.freq_steps=null", "rollout.tracing=true", "quiet=true"]
    endpoint = f"http://127.0.0.1:{server.server_port}"
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "areal.cli.main", "train", "--demo", *words],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=350,
        )
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    spans: list[Any] = []
    for body in Collector.bodies:
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        for resource in request.resource_spans:
            service = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert service["service.name"] == "areal"
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    episodes = [span for span in spans if span.name.startswith("invoke_agent ")]
    calls = [span for span in spans if span.name.startswith("chat ")]
    assert len(episodes) >= 4 + 4 + 4, "a step, and the evaluations before and after it"
    assert {call.parent_span_id for call in calls} == {episode.span_id for episode in episodes}
