import asyncio
import os
import signal
import stat
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from processes import REPORT, SLEEP, STUBBORN, WITH_CHILD, Reports, children_of, is_running, wait_until_gone

from areal.api.errors import ConfigError
from areal.config.experiment import GRPOConfig
from areal.config.keys import ADMIN_KEY_VARIABLE, ENGINE_SECRET_VARIABLE
from areal.config.loader import load_expr_config
from areal.config.training import SchedulerConfig
from areal.infra.scheduler import Command, LocalScheduler, make_scheduler

pytestmark = pytest.mark.slow


async def test_output_goes_to_the_log_and_the_exit_code_comes_back(start: Any, tmp_path: Path) -> None:
    placement = await start("import sys; print('out'); print('err', file=sys.stderr)")
    assert placement.returncode is None
    assert await asyncio.wait_for(placement.wait(), 30) == 0
    assert sorted((tmp_path / "log.txt").read_text().split()) == ["err", "out"]
    assert placement.describe_exit() == f"rollout worker 0 (pid {placement.pid}) exited with code 0"


async def test_secret_is_all_that_standard_input_has(start: Any, tmp_path: Path) -> None:
    placement = await start("import sys; print(sys.stdin.read() or 'nothing')", secret=b"of the run")
    assert await placement.wait() == 0
    assert await (await start("import sys; print(sys.stdin.read() or 'nothing')")).wait() == 0
    assert (tmp_path / "log.txt").read_text() == "of the run\nnothing\n"


@pytest.mark.parametrize("variable", [ADMIN_KEY_VARIABLE, ENGINE_SECRET_VARIABLE])
async def test_secret_in_the_environment_stays_with_the_driver(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "sk-chosen")
    code = "from pathlib import Path; print('sk-chosen' in Path('/proc/self/environ').read_text())"
    assert await (await start(code)).wait() == 0
    assert (tmp_path / "log.txt").read_text() == "False\n"


async def test_log_is_for_its_owner_only_even_if_it_was_there(scheduler: LocalScheduler, tmp_path: Path) -> None:
    old = tmp_path / "old.txt"
    old.touch(mode=0o644)
    for path in (old, tmp_path / "logs" / "new.txt"):
        placement = await scheduler.start(Command("worker", [sys.executable, "-c", ""], path))
        assert await placement.wait() == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700


async def test_exit_by_error_is_described_with_the_last_line_of_the_log(start: Any, tmp_path: Path) -> None:
    placement = await start("raise ValueError('no such model')", name="engine server 0")
    assert placement.describe_exit() == f"engine server 0 (pid {placement.pid}) is running"
    await asyncio.wait_for(placement.wait(), 30)
    assert placement.describe_exit() == (
        f"engine server 0 (pid {placement.pid}) exited with code 1: ValueError: no such model "
        f"(log: {tmp_path / 'log.txt'})"
    )


async def test_end_is_described_also_when_the_log_cannot_be_read(start: Any, tmp_path: Path) -> None:
    placement = await start("raise ValueError('no such model')")
    log = tmp_path / "log.txt"
    log.unlink()
    log.mkdir()
    await asyncio.wait_for(placement.wait(), 30)
    assert placement.describe_exit() == f"rollout worker 0 (pid {placement.pid}) exited with code 1"


async def test_kill_is_described_with_the_signal(start: Any, reports: Reports) -> None:
    placement = await start(SLEEP)
    os.kill(placement.pid, signal.SIGKILL)
    assert await asyncio.wait_for(placement.wait(), 30) == -9
    assert placement.describe_exit() == f"rollout worker 0 (pid {placement.pid}) was killed by signal 9 (SIGKILL)"


async def test_stop_asks_first(start: Any, reports: Reports) -> None:
    placement = await start(SLEEP)
    await reports.next()
    await placement.stop()
    assert placement.returncode == -signal.SIGTERM
    await placement.stop()  # again is harmless


async def test_stop_kills_what_ignores_the_request(start: Any, reports: Reports) -> None:
    placement = await start(STUBBORN)
    await reports.next()
    await placement.stop(grace_seconds=0.05)
    assert placement.returncode == -signal.SIGKILL


async def test_stop_ends_grandchildren_too(start: Any, reports: Reports) -> None:
    placement = await start(WITH_CHILD)
    (grandchild,) = await reports.next()
    await placement.stop()
    await wait_until_gone(grandchild)


async def test_death_of_a_process_ends_its_children(start: Any, reports: Reports) -> None:
    placement = await start(WITH_CHILD)
    (grandchild,) = await reports.next()
    os.kill(placement.pid, signal.SIGKILL)
    await asyncio.wait_for(placement.wait(), 30)
    await wait_until_gone(grandchild)


async def test_environment_is_passed_on_with_quiet_threads_and_loopback_past_proxies(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    names = ["NO_PROXY", "no_proxy", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MINE"]
    placement = await start(f"import os; print(*(os.environ[n] for n in {names}))", MINE="yes")
    await asyncio.wait_for(placement.wait(), 30)
    hosts = "intranet,127.0.0.1,localhost,::1"
    assert (tmp_path / "log.txt").read_text().split() == [hosts, hosts, "passive", "7", "yes"]


DRIVER = f"""
import asyncio, sys
from pathlib import Path
from areal.infra.scheduler import Command, LocalScheduler

async def main():
    scheduler = LocalScheduler()
    command = Command("worker", [sys.executable, "-c", {WITH_CHILD!r}], Path(sys.argv[1]))
    await (await scheduler.start(command)).wait()

asyncio.run(main())
"""


async def test_kill_9_of_the_driver_leaves_no_keeper_child_or_grandchild(tmp_path: Path, reports: Reports) -> None:
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", DRIVER, str(tmp_path / "log.txt"))
    (grandchild,) = await reports.next()
    (keeper,) = children_of(driver.pid)
    descendants = [keeper, *children_of(keeper), grandchild]
    assert len(descendants) == 3
    driver.kill()
    await driver.wait()
    for pid in descendants:
        await wait_until_gone(pid)


DRIVER_WITH_FILES = (
    REPORT
    + """
from pathlib import Path
from areal.infra.scheduler import LocalScheduler

directory = LocalScheduler().scratch(Path(sys.argv[1]))
(directory / "weights").write_bytes(bytes(1000))
report(os.getpid())
signal.pause()
"""
)


async def test_kill_9_of_the_driver_leaves_no_scratch_directory(tmp_path: Path, reports: Reports) -> None:
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", DRIVER_WITH_FILES, str(tmp_path))
    await reports.next()
    (keeper,) = children_of(driver.pid)
    (name,) = (name for name in os.listdir(tmp_path) if name.startswith("areal-"))
    directory = tmp_path / name
    assert directory.stat().st_mode & 0o777 == 0o700
    driver.kill()
    await driver.wait()
    await wait_until_gone(keeper)
    assert not directory.exists()


async def test_close_removes_scratch_directories(scheduler: LocalScheduler, tmp_path: Path) -> None:
    directory = scheduler.scratch(tmp_path)
    (directory / "weights").write_bytes(b"1")
    await scheduler.close()
    assert not directory.exists()


async def test_thread_that_started_a_process_may_end_before_it(tmp_path: Path, reports: Reports) -> None:
    scheduler = LocalScheduler()
    loop = asyncio.new_event_loop()

    def run(work: Coroutine[Any, Any, Any]) -> None:
        thread = threading.Thread(target=loop.run_until_complete, args=(work,))
        thread.start()
        thread.join(30)

    run(scheduler.start(Command("worker", [sys.executable, "-c", SLEEP], tmp_path / "log.txt")))
    (pid,) = await reports.next()
    assert is_running(pid)
    run(scheduler.close())
    await wait_until_gone(pid)
    loop.close()


async def test_close_stops_everything(tmp_path: Path, reports: Reports) -> None:
    scheduler = LocalScheduler()
    command = Command("worker", [sys.executable, "-c", SLEEP], tmp_path / "log.txt")
    placements = [await scheduler.start(command) for _ in range(3)]
    await scheduler.close()
    assert all(placement.returncode is not None for placement in placements)


def test_unknown_scheduler_is_refused_with_the_choices() -> None:
    assert make_scheduler(SchedulerConfig()).host == "127.0.0.1"
    with pytest.raises(ConfigError, match="type must be one of local, slurm, ray; got 'slrm'"):
        load_expr_config(["scheduler.type=slrm"], GRPOConfig)
