"""Every wait in the package has a deadline, or a reason why it ends without one.

The check reads the source. It knows the calls that wait until something happens: `event.wait()`, `thread.join()`,
`lock.acquire()`, `queue.get()`, `process.communicate()`, `future.result()`, `asyncio.wait` and `subprocess.run` without
a timeout, and calls of other processes with `timeout_seconds=None`. Inside `asyncio.timeout` or `asyncio.wait_for` they
have a deadline. What it cannot see is a bare `await future`; those are as few as their owners can keep.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ENDS = {
    "the user ends a server": [
        "areal/cli/serve.py _serve",
        "areal/engine/inference/server.py serve_by_hand",
        "areal/viewer/server.py serve",
    ],
    "an engine waits for requests": [
        "areal/engine/inference/engine.py EmbeddedEngine._drive",
    ],
    "the driver ends a worker, or is gone": [
        "areal/rollout/worker.py serve_worker",
    ],
    "a test holds it": [
        "areal/engine/inference/fake.py FakeEngine._turn",
    ],
    "the process of the trial is killed at its deadline": [
        "areal/engine/inference/grammar_trial.py GrammarTrial.__call__",
    ],
    "starting an engine has a deadline; if none can be had, `give_up` is called": [
        "areal/engine/inference/group.py EngineGroup.until_serving",
    ],
    "a change of weights ends, at the driver's deadline at the latest": [
        "areal/engine/inference/http_engine.py HttpEngine._until_drawing",
    ],
    "the deadline of the call (proxy.limits.call_timeout_seconds) or of the episode": [
        "areal/engine/inference/http_engine.py _Arrivals.next",
        "areal/engine/inference/sequence.py SequenceState.until_grown",
        "areal/proxy/transport.py AppCall._send",
        "areal/proxy/transport.py AppCall._receive",
        "areal/utils/background.py Background.run",
    ],
    "it runs beside everything, until the server ends": [
        "areal/engine/inference/http_server.py HttpServer._report_death",
    ],
    "it runs beside everything, until the server ends or is killed": [
        "areal/engine/inference/http_server.py ServerProcess._wait",
    ],
    "the deadline of the call or of the episode, or the end of the engine": [
        "areal/engine/inference/remote.py RemoteEngine._answer",
        "areal/engine/inference/remote.py RemoteEngine.astream",
    ],
    "an engine serves until the driver hangs up": [
        "areal/engine/inference/server.py serve_in_run",
    ],
    "it is waited for with a timeout in the next line": [
        "areal/infra/app_server.py AppServer.start",
    ],
    "a server serves until it is stopped": [
        "areal/infra/app_server.py _Uvicorn.main_loop",
    ],
    "the work has its own deadlines, and waits that people are told of": [
        "areal/infra/loop_thread.py LoopThread.run",
    ],
    "it is waited for with a timeout in the next lines": [
        "areal/infra/rpc/connect.py DriverListener.expect",
    ],
    "the deadline of the caller, or the end of its connection": [
        "areal/infra/rpc/connect.py DriverListener._hello",
    ],
    "it runs beside everything, until the step ends": [
        "areal/infra/scheduler/slurm.py SlurmStep._until_end",
    ],
    "the launcher kills the namespace at the program's deadline": [
        "areal/reward/sandbox/launcher/isolation.py _be_init",
    ],
    "groups have deadlines (`Dispatch`), and a failure of the run ends it": [
        "areal/rollout/pipeline.py Pipeline._until",
        "areal/rollout/pipeline.py Pipeline._unless_failed",
    ],
    "those that have a process have deadlines": [
        "areal/rollout/runners/subprocess.py AgentPool.free_process",
    ],
    "a virtual clock": [
        "areal/simulation/scenario.py _Breakdowns.interrupts",
        "areal/simulation/scenario.py _SimulatedWorker.until_present",
        "areal/simulation/servers.py Router.least_loaded",
    ],
    "the thread that writes has its own deadline, and ends every future when it ends": [
        "areal/store/writer.py StoreWriter._put_and_wait",
    ],
    "a thread waits for work": [
        "areal/store/writer.py StoreWriter._next",
        "areal/utils/process_pool/workers.py Workers.take",
    ],
    "starting an engine has a deadline, and a failure of the run ends it": [
        "areal/trainer/engines.py Engines.until",
    ],
    "it runs beside everything, until the process ends": [
        "areal/trainer/processes.py Processes._keep",
    ],
    "starting a worker has a deadline, and a failure of the run ends it": [
        "areal/trainer/workers.py RemoteWorker.until_present",
    ],
    "`Dispatch` has a deadline for each group": [
        "areal/trainer/workers.py RemoteWorker.run_group",
    ],
    "the deadline of the episode (rollout.agent.timeout_seconds)": [
        "realhf/episode.py _GenerationService.serve_while",
        "realhf/episode.py _GenerationService._serve",
        "realhf/impl/agent/math_multi_turn_agent.py MathMultiTurnAgent.collect_trajectory",
    ],
    "every choice of the call has a deadline, and tells of its end": [
        "areal/proxy/generation.py Generation._chunks_of_all",
    ],
    "a tracker's thread waits for figures until it is asked to end, and a run does not wait for it": [
        "areal/trainer/trackers.py _Sender._work",
    ],
    "an environment's thread waits for calls until its episode ends, and nothing waits for it": [
        "areal/utils/background.py OwnThread._work",
    ],
    "the future is done": [
        "areal/engine/inference/grammar.py GrammarCompiler.begin",
        "areal/engine/inference/grammar.py _verdict",
        "areal/infra/rpc/host_weights.py _give_back",
        "areal/infra/rpc/host_weights.py _lock",
        "areal/utils/process_pool/pool.py _LoopCalls._deliver",
    ],
    "the future is done, or its trial has a deadline": [
        "areal/engine/inference/grammar.py GrammarCompiler.begin_now",
    ],
}
"""What ends a wait that has no deadline of its own, and the functions, by file, of which that is true."""

PLACES = {place for places in ENDS.values() for place in places}

WITHOUT_ARGUMENTS = {"wait", "join", "acquire", "get", "communicate", "select", "wait_closed"}
THREADS = "concurrent.futures"
"""In a file that uses it, `future.result()` waits too; that of asyncio does not."""
OF_NO_QUEUE = {"_current.get"}
WITH_TIMEOUT = {"asyncio.wait", "wait", "subprocess.run", "subprocess.check_output", "subprocess.check_call"}
DEADLINES = {"asyncio.timeout", "asyncio.timeout_at", "asyncio.wait_for", "wait_for", "timeout"}


def bare_waits(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, function, call) of every wait without a deadline."""
    threads = any(isinstance(node, ast.ImportFrom) and node.module == THREADS for node in ast.walk(tree))
    names = WITHOUT_ARGUMENTS | ({"result"} if threads else set())
    yield from _below(tree, "", names, bounded=False)


def _below(node: ast.AST, function: str, names: set[str], *, bounded: bool) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function, bounded = f"{function}.{node.name}".lstrip("."), False
    if isinstance(node, ast.AsyncWith) and any(_is_deadline(item.context_expr) for item in node.items):
        bounded = True
    if isinstance(node, ast.Call):
        if not bounded and _waits(node, names):
            yield node.lineno, function, ast.unparse(node.func)
        if ast.unparse(node.func) in DEADLINES:
            bounded = True
    for child in ast.iter_child_nodes(node):
        yield from _below(child, function, names, bounded=bounded)


def _is_deadline(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in DEADLINES and not _is_none(node.args[0])


def _waits(call: ast.Call, names: set[str]) -> bool:
    name, given = ast.unparse(call.func), {word.arg for word in call.keywords}
    if any(word.arg in ("timeout", "timeout_seconds") and _is_none(word.value) for word in call.keywords):
        return True
    if name in WITH_TIMEOUT:
        return "timeout" not in given and len(call.args) < 2
    plain = isinstance(call.func, ast.Attribute) and call.func.attr in names and name not in OF_NO_QUEUE
    return plain and not call.args and not call.keywords


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def found(root: Path) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for path in sorted([*root.glob("areal/**/*.py"), *root.glob("realhf/**/*.py")]):
        where = path.relative_to(root).as_posix()
        for line, function, call in bare_waits(ast.parse(path.read_text())):
            places.setdefault(f"{where} {function}", []).append(f"{where}:{line} {call}")
    return places


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    unknown = {place: waits for place, waits in found(ROOT).items() if place not in PLACES}
    assert unknown == {}, "give it a deadline, or say in ENDS what ends it"


def test_every_reason_is_of_a_wait_that_is_there() -> None:
    assert sorted(PLACES - found(ROOT).keys()) == []


@pytest.mark.parametrize(
    ("code", "is_bare"),
    [
        ("event.wait()", True),
        ("event.wait(5)", False),
        ("thread.join()", True),
        ("', '.join(words)", False),
        ("lock.acquire()", True),
        ("lock.acquire(timeout=5)", False),
        ("asyncio.wait({task})", True),
        ("asyncio.wait({task}, timeout=5)", False),
        ("asyncio.wait_for(event.wait(), 5)", False),
        ("subprocess.run(['ls'])", True),
        ("subprocess.run(['ls'], timeout=5)", False),
        ("channel.call('x', timeout_seconds=None)", True),
        ("channel.call('x', timeout_seconds=5)", False),
        ("process.communicate()", True),
        ("future.result()", False),
        ("future.result()\nfrom concurrent.futures import Future", True),
        ("future.result(5)\nfrom concurrent.futures import Future", False),
        ("async def f():\n  async with asyncio.timeout(5):\n    await event.wait()", False),
        ("async def f():\n  async with asyncio.timeout(None):\n    await event.wait()", True),
        ("async def f():\n  async with asyncio.timeout(5):\n    pass\n  await event.wait()", True),
    ],
)
def test_the_check_tells_waits_with_a_deadline_from_those_without(code: str, is_bare: bool) -> None:
    assert bool(list(bare_waits(ast.parse(code)))) is is_bare
