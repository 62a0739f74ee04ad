"""The keeper: whatever a command or its driver does, nothing of the command is left, and its end is explained."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import SLEEP, WITH_ESCAPEE, Reports, children_of, is_running, parent_of, start_driver, wait_until_gone

from areal.api.errors import PlacementRefused, ProcessDied
from areal.infra.rpc.frames import HandshakeRefused, listener_proof, listener_seals
from areal.infra.rpc.sockets import handshake_as_caller
from areal.infra.scheduler import Ask, Command, LocalScheduler, Placement, Scheduler, keeper, scheduler
from areal.infra.scheduler.local import FreeResources, LocalLauncher

pytestmark = pytest.mark.slow
GONE_SECONDS = 30.0
"""Within this time nothing is left, however busy the machine is; it takes a fraction of a second."""


def proc_file(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def processor_ticks(pid: int) -> int:
    fields = proc_file(pid, "stat").decode().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_stop_ends_a_daemon_that_ignores_signals(start: Any, reports: Reports) -> None:
    placement = await start(WITH_ESCAPEE)
    daemon, _ = await reports.next()
    await placement.stop(grace_seconds=0.05)
    assert placement.returncode == -signal.SIGKILL
    assert not is_running(daemon)


async def test_death_of_a_command_ends_its_daemons(start: Any, reports: Reports) -> None:
    placement = await start(WITH_ESCAPEE)
    daemon, _ = await reports.next()
    os.kill(placement.pid, signal.SIGKILL)
    assert await asyncio.wait_for(placement.wait(), 30) == -signal.SIGKILL
    assert not is_running(daemon)


async def test_frozen_command_ends_with_its_daemons(
    scheduler: LocalScheduler, tmp_path: Path, reports: Reports
) -> None:
    argv = [sys.executable, "-c", WITH_ESCAPEE]
    placement = await scheduler.start(Command("worker", argv, tmp_path / "log.txt", heartbeat_seconds=0.1))
    daemon, _ = await reports.next()
    os.kill(placement.pid, signal.SIGSTOP)
    assert await asyncio.wait_for(placement.wait(), 30) == -signal.SIGKILL
    assert "was frozen (no sign of life" in placement.describe_exit()
    assert not is_running(daemon)


DRIVER = f"""
import asyncio, signal, sys
from pathlib import Path
from areal.infra.scheduler import Command, LocalScheduler

async def main():
    scheduler = LocalScheduler()
    try:
        scheduler.scratch(Path(sys.argv[1]).parent)
        command = Command("worker", [sys.executable, "-c", {WITH_ESCAPEE!r}], Path(sys.argv[1]))
        placement = await scheduler.start(command)
        await placement.wait()
    finally:
        await placement.stop(grace_seconds=0.1)
        await scheduler.close()

if sys.argv[2] == "orderly":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("sign", "manner"),
    [
        (signal.SIGKILL, "abrupt"),
        (signal.SIGTERM, "abrupt"),
        (signal.SIGTERM, "orderly"),
        (signal.SIGINT, "orderly"),
    ],
)
async def test_however_the_driver_ends_nothing_is_left_within_seconds(
    sign: signal.Signals, manner: str, tmp_path: Path, reports: Reports
) -> None:
    (tmp_path / "run").mkdir()
    driver = await start_driver(DRIVER, str(tmp_path / "run" / "log.txt"), manner)
    daemon, _ = await reports.next()
    keepers = children_of(driver.pid)
    below = [pid for each in keepers for pid in children_of(each)]
    assert parent_of(daemon) in keepers, "it adopts orphans"
    assert len(keepers) == 2  # one has the command, one the scratch directory
    assert len(list((tmp_path / "run").glob("areal-*"))) == 1
    os.killpg(driver.pid, sign)  # as a terminal does
    async with asyncio.timeout(GONE_SECONDS):
        for pid in [daemon, *keepers, *below]:
            await wait_until_gone(pid)
        await driver.wait()
    assert list((tmp_path / "run").glob("areal-*")) == []


FLOOD = """
import os, sys
print("the first line", flush=True)
block = b"x" * (1 << 16)
for _ in range(1 << 12):
    os.write(1, block)
print()
print("the last line", flush=True)
sys.exit(3)
"""


async def test_flood_of_output_neither_blocks_nor_fills_memory_and_what_is_left_out_is_counted(
    start: Any, tmp_path: Path
) -> None:
    placement = await start("import sys; sys.stdin.read()\n" + FLOOD)
    assert await asyncio.wait_for(placement.wait(), 100) == 3
    log = (tmp_path / "log.txt").read_bytes()
    assert log.startswith(b"the first line\n")
    assert log.endswith(b"\nthe last line\n")
    left_out = sum(map(int, re.findall(rb"\n\[(\d+) bytes of output are left out here: they came too fast\]\n", log)))
    assert left_out > 0
    assert left_out + log.count(b"x") == 1 << 28
    assert placement.describe_exit().endswith(f"exited with code 3: the last line (log: {tmp_path / 'log.txt'})")


async def test_keeper_that_reads_a_flood_stays_small(start: Any, tmp_path: Path, reports: Reports) -> None:
    placement = await start(FLOOD.replace("sys.exit(3)", "") + SLEEP)
    await reports.next()
    peak = re.search(r"VmHWM:\s+(\d+) kB", proc_file(parent_of(placement.pid), "status").decode())
    assert peak is not None
    assert int(peak[1]) < 64 << 10


class SlowDriver:
    """The driver's end of a keeper's connection: it starts a command and then reads nothing until it is asked."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        address = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        argv = [sys.executable, "-I", "-S", keeper.__file__, address, "0"]
        self.keeper = subprocess.Popen(argv, stdin=subprocess.PIPE)
        assert self.keeper.stdin is not None
        self.keeper.stdin.write(b"secret")
        self.keeper.stdin.close()
        self._connection, _ = self._server.accept()
        nonce = b"n" * 32
        self._connection.sendall(nonce)
        theirs = self._connection.recv(64, socket.MSG_WAITALL)
        nonces = nonce + theirs[:32]
        self._connection.sendall(listener_proof(b"secret", nonces))
        self._sealer, self._opener = listener_seals(b"secret", nonces)

    def start(self, code: str) -> None:
        words = {"argv": [sys.executable, "-c", code], "env": {}, "stdin": "", "heartbeat_seconds": None}
        self._connection.sendall(self._sealer.seal(keeper.COMMAND + json.dumps({**words, "directories": []}).encode()))

    def read(self) -> list[bytes]:
        """All that the keeper sends, to its end."""
        frames: list[bytes] = []
        while chunk := self._connection.recv(1 << 16):
            frames += self._opener.feed(chunk)
        self._connection.close()
        return frames

    def close(self) -> None:
        self._connection.close()
        self._server.close()
        self.keeper.wait(10)


async def test_keeper_of_a_driver_that_reads_nothing_waits_quietly_and_its_command_goes_on(reports: Reports) -> None:
    driver = SlowDriver()
    try:
        driver.start(FLOOD.replace("sys.exit(3)", "") + SLEEP)
        (pid,) = await reports.next()  # the flood is over, and the driver has read nothing of it
        before = processor_ticks(driver.keeper.pid)
        await asyncio.sleep(1)
        assert processor_ticks(driver.keeper.pid) - before < 20, "it spins"
        os.kill(pid, signal.SIGKILL)
        frames = await asyncio.wait_for(asyncio.to_thread(driver.read), 30)
    finally:
        driver.close()
    assert frames[-1].startswith(keeper.EXIT + b'{"code": -9')
    printed = b"".join(frame[1:] for frame in frames if frame[:1] == keeper.OUTPUT)
    assert printed.endswith(b"\nthe last line\n")


async def test_all_output_of_a_process_that_dies_at_once_arrives(start: Any, tmp_path: Path) -> None:
    placement = await start("import os; os.write(1, b'y' * 60_000); os.write(2, b'end'); os._exit(1)")
    assert await asyncio.wait_for(placement.wait(), 30) == 1
    assert (tmp_path / "log.txt").read_text() == "y" * 60_000 + "end"


async def test_keeper_that_is_asked_to_end_ends_its_command_in_order(start: Any, reports: Reports) -> None:
    placement = await start(SLEEP)
    (pid,) = await reports.next()
    os.kill(parent_of(pid), signal.SIGTERM)  # as a batch system does
    assert await asyncio.wait_for(placement.wait(), 30) == -signal.SIGTERM


async def test_killed_keeper_takes_its_command_along_and_is_named(start: Any, reports: Reports) -> None:
    placement = await start(SLEEP)
    (pid,) = await reports.next()
    os.kill(parent_of(pid), signal.SIGKILL)
    assert await asyncio.wait_for(placement.wait(), 30) == -signal.SIGKILL
    await wait_until_gone(pid)
    assert placement.describe_exit() == (
        f"rollout worker 0 (pid {pid}) was lost with its keeper: the keeper was killed by signal 9"
    )


async def test_keeper_that_falls_silent_is_given_up_and_its_command_ends(
    start: Any, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SILENT_SECONDS", 3.0)
    placement = await start(SLEEP)
    (pid,) = await reports.next()
    stopped = parent_of(pid)
    os.kill(stopped, signal.SIGSTOP)
    await asyncio.wait_for(placement.wait(), 30)
    assert "nothing was heard of it for 3 s; its host may be lost" in placement.describe_exit()
    os.kill(stopped, signal.SIGCONT)  # it then finds that it was given up
    await wait_until_gone(pid)


async def test_frozen_keeper_is_killed_with_its_command(
    start: Any, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SILENT_SECONDS", 3.0)
    placement = await start(SLEEP)
    (pid,) = await reports.next()
    os.kill(parent_of(pid), signal.SIGSTOP)
    await asyncio.wait_for(placement.wait(), 30)
    await wait_until_gone(pid)


async def test_keeper_that_hears_nothing_but_is_connected_goes_on(
    start: Any, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper's own pings keep the line alive: no command is lost for being quiet."""
    monkeypatch.setattr(scheduler, "SILENT_SECONDS", 5.0)
    placement = await start(SLEEP)
    await reports.next()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(placement.wait(), 7)
    assert placement.returncode is None


async def test_command_that_cannot_be_started_is_an_error_with_its_reason(
    scheduler: LocalScheduler, tmp_path: Path
) -> None:
    with pytest.raises(ProcessDied, match=r"engine cannot be started on \S+: .*No such file.*no-such-program"):
        await scheduler.start(Command("engine", ["no-such-program"], tmp_path / "log.txt"))
    own = Command("engine", ["true"], tmp_path / "log.txt", directories=(str(tmp_path / "new"), str(tmp_path)))
    with pytest.raises(ProcessDied, match=r"engine cannot be started on \S+: .*File exists"):
        await scheduler.start(own)
    assert os.listdir(tmp_path) == ["log.txt"], "what was made is removed, what was there is not"


async def test_keeper_that_cannot_run_is_an_error_with_its_last_words(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "keeper.py"
    broken.write_text("raise SystemExit('no such library')")
    monkeypatch.setattr(keeper, "__file__", str(broken))
    with pytest.raises(ProcessDied, match="cannot be started: its keeper exited with code 1: no such library"):
        await scheduler.start(Command("engine", ["true"], tmp_path / "log.txt"))


async def test_directories_are_made_for_the_command_and_removed_after_it(
    scheduler: LocalScheduler, tmp_path: Path, reports: Reports
) -> None:
    directory = tmp_path / "sockets"
    argv = [sys.executable, "-c", SLEEP]
    placement = await scheduler.start(Command("engine", argv, tmp_path / "log.txt", directories=(str(directory),)))
    await reports.next()
    assert directory.stat().st_mode & 0o777 == 0o700
    (directory / "file").write_text("left")
    os.kill(placement.pid, signal.SIGKILL)
    await placement.wait()
    assert not directory.exists()


async def test_shared_directory_is_removed_after_the_last_of_its_commands(
    scheduler: LocalScheduler, tmp_path: Path, reports: Reports
) -> None:
    directory = tmp_path / "weights"

    async def begun() -> Placement:
        argv = [sys.executable, "-c", SLEEP]
        placement = await scheduler.start(Command("engine", argv, tmp_path / "log.txt", shared=str(directory)))
        await reports.next()
        return placement

    async def killed(placement: Placement) -> None:
        os.kill(placement.pid, signal.SIGKILL)
        await asyncio.wait_for(placement.wait(), GONE_SECONDS)

    first, second = await begun(), await begun()
    assert directory.stat().st_mode & 0o777 == 0o700
    (directory / "file").write_text("fetched")
    await killed(first)
    third = await begun()
    await killed(second)
    assert (directory / "file").read_text() == "fetched"
    await killed(third)
    assert not directory.exists()


async def test_shared_directory_is_removed_when_all_of_its_commands_end_at_once(
    scheduler: LocalScheduler, tmp_path: Path
) -> None:
    directory, argv = tmp_path / "weights", [sys.executable, "-c", "pass"]
    command = Command("engine", argv, tmp_path / "log.txt", shared=str(directory))
    placements = await asyncio.gather(*(scheduler.start(command) for _ in range(4)))
    await asyncio.wait_for(asyncio.gather(*(placement.wait() for placement in placements)), GONE_SECONDS)
    assert not directory.exists()


async def test_shared_directory_that_is_a_link_elsewhere_is_refused(scheduler: LocalScheduler, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "weights").symlink_to(tmp_path / "elsewhere")
    command = Command("engine", ["true"], tmp_path / "log.txt", shared=str(tmp_path / "weights"))
    with pytest.raises(ProcessDied, match=r"engine cannot be started on \S+: .*Not a directory"):
        await scheduler.start(command)
    assert (tmp_path / "elsewhere").exists()


async def test_command_has_a_session_of_its_own_and_ordinary_signals(start: Any, tmp_path: Path) -> None:
    code = "import os, signal; print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT).__name__)"
    placement = await start(code)
    assert await placement.wait() == 0
    assert (tmp_path / "log.txt").read_text() == "True default_int_handler\n"


async def test_secret_of_the_keepers_is_in_no_argument_or_environment(
    scheduler: LocalScheduler, start: Any, reports: Reports
) -> None:
    placement = await start(SLEEP, secret=b"of the run")
    (pid,) = await reports.next()
    for each in (pid, parent_of(pid)):
        for place in ("cmdline", "environ"):
            shown = proc_file(each, place)
            assert shown
            assert scheduler._secret not in shown
            assert b"of the run" not in shown
    assert placement.host == socket.gethostname()
    assert placement.address == "127.0.0.1"


async def test_stranger_who_reaches_the_scheduler_is_refused(
    scheduler: LocalScheduler, start: Any, reports: Reports, log_lines: list[str]
) -> None:
    placement = await start(SLEEP)
    await reports.next()
    host, port = scheduler._served_at.removeprefix("tcp:").split(":")
    assert host == "127.0.0.1"
    reader, writer = await asyncio.open_connection(host, int(port))
    with pytest.raises(HandshakeRefused):
        await handshake_as_caller(reader, writer, b"a guess")
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    sealer, _ = await handshake_as_caller(reader, writer, scheduler._secret)
    hello = {"number": 0, "host": "elsewhere", "pid": 1, "address": "10.0.0.1"}
    writer.write(sealer.seal(keeper.HELLO + json.dumps(hello).encode()))  # that keeper is here already
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    assert placement.returncode is None
    assert len([line for line in log_lines if "refused a connection to the scheduler" in line]) == 2


SHOW_GPUS = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'unset'))"


async def test_each_command_sees_the_gpus_that_it_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    scheduler = Scheduler(LocalLauncher(FreeResources(8, 1000, ["0", "1", "GPU-5f"])))

    async def shown(ask: Ask) -> str:
        log = tmp_path / f"{ask.name}.txt"
        placement = await scheduler.start(Command(ask.name, [sys.executable, "-c", SHOW_GPUS], log, ask=ask))
        assert await placement.wait() == 0
        return log.read_text().splitlines()[-1]

    asks = [Ask("a", gpus=1), Ask("b", gpus=2), Ask("c", gpus=0), Ask("d")]
    await scheduler.reserve(asks)
    assert [await shown(ask) for ask in asks] == ["0", "1,GPU-5f", "", "unset"]
    assert await shown(asks[1]) == "1,GPU-5f", "a command that is started again has its old place"
    with pytest.raises(PlacementRefused, match="e must fit this machine, but needs 1 GPUs, 0 are free"):
        await shown(Ask("e", gpus=1))
    await scheduler.close()


async def test_reservation_is_all_or_nothing_and_says_what_is_free() -> None:
    launcher = LocalLauncher(FreeResources(4, 1000, ["0"]))
    with pytest.raises(PlacementRefused, match="b must fit this machine, but needs 3 CPUs, 2 are free and 1 GPUs, 0"):
        await launcher.reserve([Ask("a", cpus=2, gpus=1), Ask("b", cpus=3, gpus=1)], 1.0)
    with pytest.raises(PlacementRefused, match="a must fit this machine, but needs 1001 MiB of memory, 1000 are free"):
        await launcher.reserve([Ask("a", memory_mib=1001)], 1.0)
    await launcher.reserve([Ask("a", cpus=4, gpus=1, memory_mib=1000)], 1.0)
    await launcher.close()


async def test_impossible_ask_is_refused_at_once_and_leaves_no_process(
    scheduler: LocalScheduler, tmp_path: Path
) -> None:
    ask = Ask("engine", cpus=100_000)
    before = children_of(os.getpid())
    with pytest.raises(PlacementRefused, match=r"engine must fit this machine, but needs 100000 CPUs, \d+ are free"):
        await scheduler.start(Command("engine", ["true"], tmp_path / "log.txt", ask=ask))
    assert children_of(os.getpid()) == before
