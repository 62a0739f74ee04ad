"""An HTTP client per episode against the one that all episodes share, in 256 episodes of one model call each.

Calls go through the real proxy to an engine that costs nothing, all in this process, so processor time is that of both
ends. A client per episode reaches the proxy over TCP, the shared one without the network. The guide for agents claims
some 50 ms for each client and 10 s for 256.
"""

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from benchmarks.instant import instant_proxy
from benchmarks.report import Aim, main

EPISODES = 256
CLAIMED_MS = 50.0
CLAIMED_SECONDS = 10.0
BODY: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "Sort 5291"}]}


@dataclass
class Clock:
    """Processor and wall time, summed over the times it was entered."""

    cpu: float = 0.0
    wall: float = 0.0
    _began: tuple[float, float] = field(default=(0.0, 0.0))

    def __enter__(self) -> None:
        self._began = time.process_time(), time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self.cpu += time.process_time() - self._began[0]
        self.wall += time.perf_counter() - self._began[1]


async def episodes(proxy: Any, count: int, *, shared: bool) -> dict[str, float]:
    """`count` episodes at once; making the client is timed by itself, because no other episode runs meanwhile."""
    making, all_of_it = Clock(), Clock()

    async def episode() -> None:
        session = proxy.open_session()
        async with AsyncExitStack() as stack:
            with making:
                http = proxy.http_client if shared else httpx.AsyncClient()
                client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
            if not shared:
                await stack.enter_async_context(http)
            answer = await client.chat.completions.create(**BODY)
            assert answer.choices
        await proxy.end_session(session)

    with all_of_it:
        await asyncio.gather(*(episode() for _ in range(count)))
    return {
        "client_cpu_ms": making.cpu / count * 1e3,
        "client_wall_ms": making.wall / count * 1e3,
        "episode_cpu_ms": all_of_it.cpu / count * 1e3,
        "episode_wall_ms": all_of_it.wall / count * 1e3,
        "clients_seconds": making.wall,
        "total_seconds": all_of_it.wall,
    }


async def compare(count: int) -> dict[str, Any]:
    proxy = await instant_proxy()
    try:
        for shared in (True, False):
            await episodes(proxy, 2, shared=shared)
        return {name: await episodes(proxy, count, shared=name == "shared") for name in ("own", "shared")}
    finally:
        await proxy.aclose()


def run(count: int = EPISODES) -> tuple[dict[str, Any], list[Aim]]:
    found = asyncio.run(compare(count))
    own, shared = found["own"], found["shared"]
    claim = {
        "claimed_ms_per_client": CLAIMED_MS,
        "claimed_seconds_per_256": CLAIMED_SECONDS,
        "here_cpu_ms_per_client": own["client_cpu_ms"] - shared["client_cpu_ms"],
        "here_wall_ms_per_client": own["client_wall_ms"] - shared["client_wall_ms"],
        "here_cpu_seconds_per_256": (own["client_cpu_ms"] - shared["client_cpu_ms"]) * 256 / 1e3,
    }
    figures = {"episodes": count, "load_average": os.getloadavg()[0], **found, "guide": claim}
    making, total = (own[key] / shared[key] for key in ("client_cpu_ms", "total_seconds"))
    aims = [
        Aim.at_least("processor time to make a client, own over shared", making, 10.0),
        Aim.at_least("time of all episodes, own over shared", total, 2.0),
    ]
    return figures, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
