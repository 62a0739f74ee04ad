"""What the proxy adds to a model call: latency and processor time, over TCP and in process, compared with LiteLLM's.

Its engine costs nothing. Calls are driven by a raw client (aiohttp, no SDK) in this process; the proxy is a process of
its own, with one worker. LiteLLM runs in an environment of its own and forwards to a bare server with a
constant answer.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.instant import instant_proxy, resident_bytes
from benchmarks.peers import peer_environment
from benchmarks.report import Aim, main

BODY = {"model": "default", "messages": [{"role": "user", "content": "Sort 5291"}]}
CONCURRENCIES = (1, 64, 256, 1000)
LITELLM_CONCURRENCIES = (1, 64)
START_SECONDS = 120.0
Call = Callable[[int], Awaitable[None]]


async def measure(call: Call, concurrency: int, calls: int) -> dict[str, float]:
    """Latency of `calls` calls, `concurrency` at a time, each on its own session."""
    latencies: list[float] = []

    async def client(number: int) -> None:
        for _ in range(max(2, calls // concurrency)):
            began = time.perf_counter()
            await call(number)
            latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(client(number) for number in range(concurrency)))
    latencies.sort()
    return {
        "calls": len(latencies),
        "p50_ms": statistics.median(latencies) * 1e3,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
    }


async def over_tcp(
    urls: list[str], keys: list[str], cpu: Callable[[], float], sizes: tuple[int, ...]
) -> dict[str, Any]:
    body = json.dumps(BODY)
    figures = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def call(number: int) -> None:
            headers = {"authorization": f"Bearer {keys[number % len(keys)]}", "content-type": "application/json"}
            async with http.post(f"{urls[number % len(urls)]}/chat/completions", data=body, headers=headers) as answer:
                text = await answer.text()
                assert answer.status == 200, text

        await measure(call, sizes[0], 20)
        for concurrency in sizes:
            before = cpu()
            result = await measure(call, concurrency, max(400, 2 * concurrency))
            figures[str(concurrency)] = result | {"cpu_us_per_call": (cpu() - before) / result["calls"] * 1e6}
    return figures


async def in_process() -> dict[str, Any]:
    """Calls through the shared http client, without and with the OpenAI SDK; processor time is that of both ends."""
    from openai import AsyncOpenAI

    proxy = await instant_proxy()
    memory = await session_memory(proxy)  # first: later it would grow into memory that others had freed
    sessions = [proxy.open_session() for _ in range(1000)]
    clients = [
        AsyncOpenAI(base_url=s.base_url, api_key=s.api_key, http_client=proxy.http_client, max_retries=0)
        for s in sessions[:64]
    ]

    async def raw(number: int) -> None:
        session = sessions[number]
        answer = await proxy.http_client.post(
            f"{session.base_url}/chat/completions", json=BODY, headers={"authorization": f"Bearer {session.api_key}"}
        )
        assert answer.status_code == 200

    async def sdk(number: int) -> None:
        await clients[number].chat.completions.create(**BODY)  # type: ignore[call-overload]

    figures: dict[str, Any] = {"memory": memory}
    for name, call, sizes in (("raw", raw, CONCURRENCIES), ("openai_sdk", sdk, (1, 64))):
        await measure(call, 1, 50)
        figures[name] = {}
        for concurrency in sizes:
            before = time.process_time()
            result = await measure(call, concurrency, max(400, 2 * concurrency))
            used = (time.process_time() - before) / result["calls"] * 1e6
            figures[name][str(concurrency)] = result | {"cpu_us_per_call": used}
    await proxy.aclose()
    return figures


async def session_memory(proxy: Any) -> dict[str, float]:
    """Resident memory of 10,000 open sessions, then of one more turn in each of 500 of them, twice."""
    before = resident_bytes()
    sessions = [proxy.open_session() for _ in range(10_000)]
    opened = resident_bytes()
    grown = []
    for turn in range(1, 4):
        start = resident_bytes()
        for session in sessions[:500]:
            messages = [{"role": "user", "content": f"Sort {turn}291"}]
            answer = await proxy.http_client.post(
                f"{session.base_url}/chat/completions",
                json={"model": "default", "messages": messages},
                headers={"authorization": f"Bearer {session.api_key}"},
            )
            assert answer.status_code == 200
        grown.append((resident_bytes() - start) / 500)
    return {
        "open_sessions": len(sessions),
        "bytes_per_session": (opened - before) / len(sessions),
        "bytes_per_first_turn": grown[0],
        "bytes_per_second_turn": grown[1],
        "bytes_per_third_turn": grown[2],
    }


@contextmanager
def process(*argv: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(argv, text=True, stdin=subprocess.PIPE, start_new_session=True, **options)
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def ours() -> dict[str, Any]:
    with process(sys.executable, "-m", "benchmarks.instant", "1000", stdout=subprocess.PIPE) as server:
        sessions = _ask(server)["sessions"]
        urls, keys = [url for url, _ in sessions], [key for _, key in sessions]
        return asyncio.run(over_tcp(urls, keys, lambda: float(_ask(server, "\n")["cpu"]), CONCURRENCIES))


def _ask(server: subprocess.Popen[str], question: str = "") -> dict[str, Any]:
    """The next line that the server prints, after `question` was written to it."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(question)
    server.stdin.flush()
    answer: dict[str, Any] = json.loads(server.stdout.readline())
    return answer


def litellm() -> dict[str, Any]:
    """The same calls through LiteLLM's proxy."""
    programs = peer_environment("litellm", ["litellm[proxy]"])
    with (
        tempfile.TemporaryDirectory() as place,
        process(sys.executable, "-m", "benchmarks.instant", "--upstream", stdout=subprocess.PIPE) as upstream,
    ):
        port = _ask(upstream)["port"]
        config = Path(place) / "config.yaml"
        params = {"model": "openai/instant", "api_base": f"http://127.0.0.1:{port}/v1", "api_key": "none"}
        config.write_text(json.dumps({"model_list": [{"model_name": "default", "litellm_params": params}]}))
        ours_port = _free_port()
        words = [str(programs / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(ours_port)]
        key = f"sk-{secrets.token_hex(32)}"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with process(*words, env=os.environ | {"LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": key}, **quiet) as proxy:
            _wait_for_port(ours_port, proxy)
            url = f"http://127.0.0.1:{ours_port}/v1"
            return asyncio.run(over_tcp([url], [key], lambda: _cpu_of(proxy.pid), LITELLM_CONCURRENCIES))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, server: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"LiteLLM's proxy did not listen within {START_SECONDS:.0f} s")


def _cpu_of(pid: int) -> float:
    """Processor seconds of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run() -> tuple[dict[str, Any], list[Aim]]:
    inline = asyncio.run(in_process())
    tcp = ours()
    peer = litellm()
    ratio = peer["64"]["cpu_us_per_call"] / tcp["64"]["cpu_us_per_call"]
    aims = [
        Aim.at_most("added latency in process, one session, p50 ms", inline["raw"]["1"]["p50_ms"], 1.0),
        Aim.at_most("added latency over TCP, one session, p50 ms", tcp["1"]["p50_ms"], 3.0),
        Aim.at_least("LiteLLM's processor time per call over ours, 64 sessions", ratio, 30.0),
        Aim.at_least("sessions open at once", inline["memory"]["open_sessions"], 10_000),
    ]
    return {"in_process": inline, "tcp": tcp, "litellm": peer}, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
