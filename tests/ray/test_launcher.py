"""Keepers are placed on the nodes of a real Ray cluster, refused with a reason, and leave nothing behind."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from areal.api.errors import PlacementRefused
from areal.infra.scheduler.base import Ask, KeeperStart
from areal.infra.scheduler.ray import RayLauncher

READ_AND_SAY = "import sys, os; print('pid', os.getpid(), 'read', sys.stdin.read()); sys.exit(3)"
WAIT = "import sys, time; sys.stdin.read(); time.sleep(600)"


@pytest.fixture
async def launcher(cluster: Any) -> AsyncIterator[RayLauncher]:
    launcher = RayLauncher(cluster.address)
    yield launcher
    await launcher.close()


def _keeper(code: str) -> KeeperStart:
    return KeeperStart([sys.executable, "-c", code], b"the secret")


async def test_keepers_get_a_place_each_and_read_the_secret(launcher: RayLauncher) -> None:
    asks = [Ask("engine 0", cpus=3), Ask("engine 1", cpus=3), Ask("worker 0")]  # no node has room for both engines
    await launcher.reserve(asks, 30)
    keepers = [await launcher.launch(ask, _keeper(READ_AND_SAY)) for ask in asks]
    reasons = await asyncio.wait_for(asyncio.gather(*(keeper.ended for keeper in keepers)), 60)
    assert all("ended with code 3" in reason and "read the secret" in reason for reason in reasons), reasons


async def test_a_command_that_is_started_again_takes_its_old_place(launcher: RayLauncher) -> None:
    asks = [Ask("engine 0", cpus=4), Ask("engine 1", cpus=4)]  # all that the cluster has
    await launcher.reserve(asks, 30)
    for _ in range(2):
        keeper = await launcher.launch(asks[0], _keeper(READ_AND_SAY))
        assert "code 3" in await asyncio.wait_for(keeper.ended, 60)


async def test_a_keeper_that_does_not_end_is_killed(launcher: RayLauncher) -> None:
    ask = Ask("worker 0")
    await launcher.reserve([ask], 30)
    keeper = await launcher.launch(ask, _keeper(WAIT))
    done, _ = await asyncio.wait({keeper.ended}, timeout=8)  # long enough for the actor to start it
    assert not done
    await keeper.kill()
    assert "code -9" in await asyncio.wait_for(keeper.ended, 60)


async def test_a_keeper_that_is_killed_at_once_does_not_start(launcher: RayLauncher) -> None:
    ask = Ask("worker 0")
    await launcher.reserve([ask], 30)
    keeper = await launcher.launch(ask, _keeper(WAIT))
    await keeper.kill()
    assert "killed before it started" in (said := await asyncio.wait_for(keeper.ended, 60)) or "code -9" in said


@pytest.mark.parametrize(
    ("ask", "free"), [(Ask("engine 0", cpus=64), "64 cpus"), (Ask("engine 0", cpus=1, gpus=8), "1 cpus, 8 gpus")]
)
async def test_an_impossible_ask_is_refused_with_what_is_free(launcher: RayLauncher, ask: Ask, free: str) -> None:
    with pytest.raises(PlacementRefused, match=rf"no place within 2 s for engine 0: {free}.* it has 8 cpus"):
        await launcher.reserve([ask], 2)


async def test_the_environment_of_the_driver_reaches_the_keeper(
    launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_ADMIN_KEY", "for the driver only")
    monkeypatch.setenv("MY_SETTING", "for all")
    ask = Ask("worker 0")
    await launcher.reserve([ask], 30)
    show = "import os; print(os.environ.get('MY_SETTING'), os.environ.get('AREAL_ADMIN_KEY'))"
    said = await asyncio.wait_for((await launcher.launch(ask, _keeper(show))).ended, 60)
    assert "for all None" in said


async def test_ray_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PlacementRefused, match=r"pip install .*\[ray\]'"):
        await RayLauncher().reserve([Ask("worker 0")], 2)
