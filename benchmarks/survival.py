"""An hour of attacks in a quarter of one, and what is left of the system: `python -m benchmarks.survival --json`.

1. Fuzzed bodies, answered in process (`benchmarks.fuzz`).
2. Calls that are cancelled, and clients that hang up, at random moments while others are served by the embedded engine:
   before, while and after the engine answers, and in the very tick in which it does.
3. SIGKILL and SIGSTOP of engines, rollout workers and drivers, while they start, evaluate, train, save and end. A
   killed driver is started again and goes on. The journal of a run must hold each of its groups once.
4. Agents that raise, hang, are rewarded with NaN and end their process, inline and in processes of their own.

Aims: no hang, no death that was not asked for, no group lost or trained twice, no process, shared memory, directory,
sequence or task left behind, no status of 500. The seed decides what is sent and who is attacked; when exactly an
attack arrives depends on the machine too. `--quick` is for tests, it takes half a minute.
"""

import argparse
import asyncio
import json
import logging
import random
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.server import load_engine
from areal.engine.models import find_model, max_positions
from areal.proxy import Proxy, Session
from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.logging import getLogger
from benchmarks.attacked_run import (
    BATCH,
    ENGINE,
    MAX_FAILED_RUNS,
    SAMPLES,
    WORKER,
    AttackedRun,
    Damage,
    go_on,
    note_end,
    progress,
)
from benchmarks.fuzz import NO_ANSWER, fuzz
from benchmarks.report import Aim, main

MODEL = "builtin:tiny-math"


@dataclass(frozen=True)
class Counts:
    """How many of each attack."""

    bodies: int = 100_000
    cancellations: int = 2_000
    kills: int = 200
    kill_steps: int = 20
    """Of each run whose processes are killed."""
    agent_steps: int = 12
    """Of each run with bad agents."""


QUICK = Counts(bodies=200, cancellations=80, kills=4, kill_steps=4, agent_steps=1)


# ---------------------------------------------------------------------------------------------- 1. fuzzed bodies


def send_bodies(count: int, seed: int) -> dict[str, Any]:
    report = asyncio.run(fuzz(count, seed, progress=lambda line: progress(f"bodies: {line}")))
    if report.smallest is not None:
        progress(str(report))
    return {
        "sent": report.statuses.total(),
        "status_500": sum(count for status, count in report.statuses.items() if status >= 500),
        "hangs": report.statuses[NO_ANSWER],
        "failures": len(report.failures),
        "slowest_seconds": report.slowest_seconds,
        "seconds": report.seconds,
    }


# --------------------------------------------------------------------------------- 2. cancellations, disconnects

ATTACKERS = 16
BYSTANDERS = 4
"""Clients that only want their answers."""
CALL_SECONDS = 30.0
IDLE_SECONDS = 10.0
NEW_TOKENS = 12
QUESTION = {"model": "default", "messages": [{"role": "user", "content": "Sort 5291"}], "max_tokens": NEW_TOKENS}
CALM_CALLS = 5
"""To find out how long a call takes, in ticks of the event loop: the least of these, because some wait for threads."""


class Served:
    """A proxy on the embedded engine, its clients, and what became of their calls."""

    def __init__(self, seed: int) -> None:
        directory = find_model(MODEL, lambda text, share: progress(text))
        self.engine: EmbeddedEngine = load_engine(directory)
        tokenizer = load_hf_tokenizer(directory)
        sampling = GenerationHyperparameters(max_new_tokens=NEW_TOKENS)
        self.proxy = Proxy(self.engine, tokenizer, gconfig=sampling, max_positions=max_positions(directory))
        self.draw = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self._prompt: list[int] = tokenizer.encode("Sort 5291", add_special_tokens=False)
        self._attacks: tuple[Callable[[], Awaitable[str]], ...] = (
            self._cancel_generation,
            self._cancel_call,
            self._cancel_stream,
            self._end_session,
            self._hang_up_in_request,
            self._hang_up_before_answer,
            self._hang_up_in_stream,
        )
        self._ticks: dict[str, int] = {}
        """How many ticks a call takes that is left alone, by its kind."""

    async def measure_ticks(self) -> None:
        for kind, call in (("generation", self._generate), ("call", self._ask)):
            self._ticks[kind] = min([await _ticks_of(call) for _ in range(CALM_CALLS)])

    async def attack(self) -> None:
        attack = self.draw.choice(self._attacks)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                outcome = await attack()
        except TimeoutError:
            outcome = "hang"
        self.outcomes[f"{attack.__name__.strip('_').replace('_', ' ')}: {outcome}"] += 1

    async def call(self) -> None:
        """By a client among the attackers; it must be answered."""
        call = asyncio.ensure_future(self._ask())
        await asyncio.wait((call,), timeout=CALL_SECONDS)
        self.outcomes[f"bystander: {_outcome(call) if call.done() else 'hang'}"] += 1
        call.cancel()

    async def _generate(self) -> Any:
        """At the engine, without a proxy. No token ends it early, so it is known when it will be answered."""
        sampling = GenerationHyperparameters(max_new_tokens=NEW_TOKENS)
        return await self.engine.agenerate(ModelRequest(secrets.token_hex(8), self._prompt, sampling))

    async def _ask(self) -> None:
        """As an inline agent does."""
        session = self.proxy.open_session()
        try:
            await self._client(session).chat.completions.create(**QUESTION)
        finally:
            await self.proxy.end_session(session)

    async def _ask_streaming(self, session: Session) -> None:
        async for _ in await self._client(session).chat.completions.create(**QUESTION, stream=True):
            pass

    def _client(self, session: Session) -> Any:
        from openai import AsyncOpenAI

        shared: Any = self.proxy.http_client
        return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=shared, max_retries=0)

    async def _cancel_generation(self) -> str:
        return await self._cancel(self._generate(), self._moment("generation"))

    async def _cancel_call(self) -> str:
        return await self._cancel(self._ask(), self._moment("call"))

    async def _cancel_stream(self) -> str:
        session = self.proxy.open_session()
        outcome = await self._cancel(self._ask_streaming(session), self._moment("call"))
        await self.proxy.end_session(session)
        return outcome

    async def _end_session(self) -> str:
        session = self.proxy.open_session()
        call = asyncio.ensure_future(self._ask_streaming(session))
        await _ticks(self._moment("call"))
        await self.proxy.end_session(session)
        await asyncio.wait((call,))
        return _outcome(call)

    async def _hang_up_in_request(self) -> str:
        raw = self._request(session := self.proxy.open_session(), stream=False)
        outcome = await self._hang_up(raw[: self.draw.randrange(len(raw))], read_bytes=0, ticks=self.draw.randrange(5))
        await self.proxy.end_session(session)
        return outcome

    async def _hang_up_before_answer(self) -> str:
        raw = self._request(session := self.proxy.open_session(), stream=self.draw.random() < 0.5)
        outcome = await self._hang_up(raw, read_bytes=0, ticks=self._moment("call"))
        await self.proxy.end_session(session)
        return outcome

    async def _hang_up_in_stream(self) -> str:
        raw = self._request(session := self.proxy.open_session(), stream=True)
        outcome = await self._hang_up(raw, read_bytes=self.draw.randrange(1, 4000), ticks=0)
        await self.proxy.end_session(session)
        return outcome

    def _moment(self, kind: str) -> int:
        """A number of ticks: anywhere in a call, or around its end."""
        usual = self._ticks[kind]
        return self.draw.randrange(usual) if self.draw.random() < 0.5 else max(0, usual + self.draw.randint(-4, 4))

    async def _cancel(self, work: Any, ticks: int) -> str:
        call = asyncio.ensure_future(work)
        await _ticks(ticks)
        call.cancel()
        await asyncio.wait((call,))
        return _outcome(call)

    def _request(self, session: Session, *, stream: bool) -> bytes:
        body = json.dumps(QUESTION | {"stream": stream}).encode()
        head = [
            f"POST {urlsplit(session.base_url).path}/chat/completions HTTP/1.1",
            f"host: {urlsplit(self.proxy.origin).netloc}",
            f"authorization: Bearer {session.api_key}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        return "\r\n".join([*head, "", ""]).encode() + body

    async def _hang_up(self, sent: bytes, *, read_bytes: int, ticks: int) -> str:
        """Close the connection in order, or break it so that the server's next write fails."""
        address = urlsplit(self.proxy.origin)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(sent)
        await writer.drain()
        got = 0
        while got < read_bytes and (more := await reader.read(read_bytes - got)):
            got += len(more)
        await _ticks(ticks)
        if self.draw.random() < 0.5:
            writer.transport.abort()
            return "broken"
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return "closed"


def _outcome(call: asyncio.Future[Any]) -> str:
    """How a call that is done has ended: answered, cancelled, or with an error's status."""
    if call.cancelled():
        return "cancelled"
    error = call.exception()
    return "answered" if error is None else f"error {getattr(error, 'status_code', type(error).__name__)}"


async def _ticks(count: int) -> None:
    """Let the event loop turn so often; the engine computes at most one step in each turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def _ticks_of(call: Callable[[], Awaitable[Any]]) -> int:
    task, ticks = asyncio.ensure_future(call()), 0
    while not task.done():
        await asyncio.sleep(0)
        ticks += 1
    task.result()
    return ticks


async def cancel_and_hang_up(count: int, seed: int) -> dict[str, Any]:
    """Attack the engine and its proxy; afterwards both answer, and nothing is left of the calls."""
    began = time.monotonic()
    served, calm, errors = Served(seed), asyncio.Event(), _Errors()
    getLogger("engine").addHandler(errors)
    await served.proxy.start()
    await served.measure_ticks()
    numbers = iter(range(1, count + 1))

    async def attacker() -> None:
        for number in numbers:
            await served.attack()
            if number % 500 == 0:
                progress(f"cancellations: {number} of {count}")

    async def bystander() -> None:
        while not calm.is_set():
            await served.call()

    bystanders = [asyncio.ensure_future(bystander()) for _ in range(BYSTANDERS)]
    await asyncio.gather(*(attacker() for _ in range(ATTACKERS)))
    calm.set()
    await asyncio.gather(*bystanders)
    left = await _left_in(served.engine)
    await served.call()
    rows_at_rest = 1  # that of the last answer stays until another needs it
    left["cache_rows"] = max(0, _cache_rows(served.engine) - rows_at_rest)
    left["sessions"] = len(served.proxy)
    failure = served.engine.failure
    await served.proxy.aclose()
    await served.engine.aclose()
    getLogger("engine").removeHandler(errors)
    left["tasks"] = len(asyncio.all_tasks()) - 1
    outcomes = served.outcomes
    return {
        "attacks": count,
        "outcomes": dict(sorted(outcomes.items())),
        "hangs": sum(number for name, number in outcomes.items() if name.endswith(": hang")),
        "status_500": sum(number for name, number in outcomes.items() if re.search(": error 5", name)),
        "bystanders_failed": sum(
            number for name, number in outcomes.items() if name.startswith("bystander: ") and "answered" not in name
        ),
        "engine_deaths": int(failure is not None),
        "failed_steps": errors.count,
        "left": left,
        "seconds": time.monotonic() - began,
    }


class _Errors(logging.Handler):
    """Counts what a logger says is an error: a step that fails is one, also if the engine gets over it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


async def _left_in(engine: EmbeddedEngine) -> dict[str, int]:
    """What the engine still runs once it has had time to end it."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        health = await engine.health()
        if not (health.running or health.waiting or engine._scheduler) or time.monotonic() > deadline:
            return {"running": health.running, "waiting": health.waiting, "scheduled": len(engine._scheduler)}
        await asyncio.sleep(0.01)


def _cache_rows(engine: EmbeddedEngine) -> int:
    cache: Any = engine._runner._cache  # type: ignore[attr-defined]
    return sum(pool.rows for pool in cache.pools)


# ----------------------------------------------------------------------- 3. and 4. processes that die, bad agents

VICTIMS = {ENGINE: 35, WORKER: 45, "driver": 15, "paused driver": 5}
"""Who is attacked, and how often of a hundred times."""
WHEN_TRAINING = 0.7
"""The share of attacks that wait until the run has got over the last one; the others hit it while it recovers."""
MOST_WAIT_SECONDS = 1.5
"""Before an attack, so that it may come at any point of a step."""
ATTACKS_PER_RUN = 25
"""Then it is left to end."""
PAUSE_SECONDS = 3.0
"""Longer than a heartbeat may be late: a driver that was stopped must not take its processes for frozen."""
AGENT_SECONDS = 4.0
"""After which an agent that hangs is given up."""


def examine(
    run: AttackedRun, code: int | None, damage: Damage, *, all_groups: bool = True, expected_end: str = ""
) -> None:
    """Add to `damage` what the run shows once it has ended with an exit code; None = it hangs.

    `all_groups`: none may have been rejected either; `expected_end`: how workers may end without an attack.
    """
    note_end(run, code, damage, expected_end)
    steps = Counter(row["step"] for row in run.lines("metrics.jsonl") if "reward" in row)
    found: dict[int, list[int]] = {}
    for row in run.lines("rollouts.jsonl"):
        found.setdefault(row["task_id"], []).append(row["step"])
    twice = [task for task, each in found.items() if len(set(each)) > 1 or len(each) > SAMPLES]
    in_part = [task for task, each in found.items() if all_groups and len(each) < SAMPLES]
    missing = [task for task in range(run.steps * BATCH) if task not in found] if all_groups else []
    unrecorded = [step for step in range(1, run.steps + 1) if steps[step] == 0]
    repeated = [step for step, times in steps.items() if times > 1]
    damage.doubled_groups += len(twice) + BATCH * len(repeated)
    damage.lost_groups += len(missing) + len(in_part) + BATCH * len(unrecorded)
    if twice or repeated or missing or in_part or unrecorded:
        progress(f"groups twice {twice}, missing {missing}, in part {in_part}; steps {repeated} twice, no {unrecorded}")


def kill_processes(count: int, steps: int, seed: int, place: Path) -> Damage:
    """Runs under fire, one after another, until there were so many attacks. All must end as if nothing had happened."""
    draw, damage, began = random.Random(seed), Damage(), time.monotonic()
    while damage.attacks.total() < count and damage.failed_runs + damage.hangs < MAX_FAILED_RUNS:
        # With either staleness no group becomes stale, so the tasks of a run are known, and none may be missing.
        with AttackedRun(
            place / f"run-{damage.runs}",
            steps,
            "benchmarks.attacked.Slow",
            f"seed={draw.randrange(1000)}",
            f"rollout.max_head_offpolicyness={draw.choice((0, steps))}",
            "rollout.num_workers=2",
        ) as run:
            code = None
            with suppress(TimeoutError):
                code = attack(run, draw, min(ATTACKS_PER_RUN, count - damage.attacks.total()), damage)
            examine(run, code, damage)
        shutil.rmtree(run.place)
        progress(f"kills: {damage.attacks.total()} of {count} in {damage.runs} runs ({time.monotonic() - began:.0f} s)")
    damage.seconds = time.monotonic() - began
    return damage


def attack(run: AttackedRun, draw: random.Random, count: int, damage: Damage) -> int:
    """Attack random processes of the run at random moments, then let it end; its exit code.

    Raises TimeoutError if it hangs.
    """
    for victim in draw.choices(list(VICTIMS), list(VICTIMS.values()), k=count):
        trained, struck = draw.random() < WHEN_TRAINING, False
        while not struck:
            code = run.wait_for_step() if trained else None
            code = run.wait(draw.uniform(0, MOST_WAIT_SECONDS)) if code is None else code
            if code is None:
                struck = strike(run, victim, draw, damage)
            else:
                return code
    return run.wait_to_end()


def strike(run: AttackedRun, victim: str, draw: random.Random, damage: Damage) -> bool:
    """False if there is no such process at the moment: it is being started."""
    if victim == "paused driver":
        run.driver.send_signal(signal.SIGSTOP)
        run.wait(PAUSE_SECONDS)
        run.driver.send_signal(signal.SIGCONT)
        damage.attacks["driver SIGSTOP and SIGCONT"] += 1
        return True
    sign = signal.SIGKILL
    if victim == "driver":
        pids = [run.driver.pid]
    else:
        pids = run.find(victim)
        sign = draw.choices((signal.SIGKILL, signal.SIGSTOP), (65, 35))[0]
    if not pids:
        return False
    run.attack(draw.choice(pids), sign)
    damage.attacks[f"{victim} {sign.name}"] += 1
    if victim == "driver":
        go_on(run, damage)
    return True


def run_bad_agents(steps: int, seed: int, place: Path) -> dict[str, Damage]:
    """Runs whose agents fail in every way that `Unreliable` knows; they train all of their steps."""
    found = {}
    for mode, end, settings in (
        # An agent that ends its worker costs every episode there, so there are few at a time.
        ("inline", "exited with code 7", (f"rollout.max_concurrent_rollouts={2 * SAMPLES}", "rollout.num_workers=2")),
        ("subproc", "", ("rollout.agent.subproc_max_workers=4", "rollout.num_workers=1")),
    ):
        began, damage = time.monotonic(), Damage()
        with AttackedRun(
            place / mode,
            steps,
            "benchmarks.attacked.Unreliable",
            f"seed={seed}",
            f"rollout.agent.mode={mode}",
            f"rollout.agent.timeout_seconds={AGENT_SECONDS}",
            *settings,
        ) as run:
            code = None
            with suppress(TimeoutError):
                code = run.wait_to_end()
            examine(run, code, damage, all_groups=False, expected_end=end)
        damage.seconds = time.monotonic() - began
        found[mode] = damage
        progress(f"bad agents, {mode}: {damage.restarts} restarts, {dict(damage.rejections)}, {damage.seconds:.0f} s")
    return found


# ------------------------------------------------------------------------------------------------------- all of it


def run(seed: int, counts: Counts) -> tuple[dict[str, Any], list[Aim]]:
    with tempfile.TemporaryDirectory(prefix="survival-") as place:
        agents = run_bad_agents(counts.agent_steps, seed, Path(place) / "agents")
        kills = kill_processes(counts.kills, counts.kill_steps, seed, Path(place) / "kills")
    calls = asyncio.run(cancel_and_hang_up(counts.cancellations, seed))
    bodies = send_bodies(counts.bodies, seed)
    damages = [kills, *agents.values()]

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in damages)

    values = {
        "hangs": bodies["hangs"] + calls["hangs"] + total("hangs"),
        "statuses of 500 and above": bodies["status_500"] + calls["status_500"],
        "fuzzed bodies that failed in another way": bodies["failures"] - bodies["hangs"] - bodies["status_500"],
        "calls of bystanders without an answer": calls["bystanders_failed"],
        "decode steps that failed": calls["failed_steps"],
        "deaths of engines that no one attacked": calls["engine_deaths"] + total("engine_deaths"),
        "deaths of workers that no one attacked": total("worker_deaths"),
        "sequences, cache rows, sessions and tasks left": sum(calls["left"].values()),
        "runs that failed": total("failed_runs"),
        "groups lost": total("lost_groups"),
        "groups trained twice": total("doubled_groups"),
        "processes left": total("orphans"),
        "shared memory left": total("leaked_shared_memory"),
        "temporary directories left": total("leaked_directories"),
    }
    figures = {
        "seed": seed,
        "bodies": bodies,
        "cancellations": calls,
        "kills": vars(kills),
        "bad_agents": {mode: vars(damage) for mode, damage in agents.items()},
    }
    made = Aim.at_least("attacks on processes", kills.attacks.total(), counts.kills)
    return figures, [made, *(Aim.at_most(name, value, 0) for name, value in values.items())]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="decides the attacks (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few attacks of each kind, to check that all of it runs")
    return parser


if __name__ == "__main__":
    parser = options()
    asked = parser.parse_known_args()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that its runs end too
    main(__doc__ or "", lambda: run(asked.seed, QUICK if asked.quick else Counts()), parser)
