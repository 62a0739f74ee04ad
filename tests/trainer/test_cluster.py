"""What synchronous code learns of the processes of a run: why it failed, not what that broke."""

from pathlib import Path

import pytest

from areal.api.errors import RanksLost
from areal.config.training import SchedulerConfig
from areal.infra.rpc.channel import RemoteError
from areal.trainer.cluster import Cluster

pytestmark = pytest.mark.slow  # a cluster has a keeper


def test_an_error_that_a_death_has_caused_waits_for_it(tmp_path: Path) -> None:
    """A rank notices that another is gone before the driver is told that it died."""
    with Cluster(SchedulerConfig(), tmp_path, []) as cluster:

        async def collective() -> None:
            cluster.call_soon(lambda: cluster.fail(RanksLost("rank 1 was killed by signal 9")))
            raise RemoteError("rank 0", "RuntimeError", "Connection reset by peer", "")

        with pytest.raises(RanksLost, match="rank 1 was killed"):
            cluster.wait(collective())


def test_an_error_without_a_death_is_told_as_it_is(tmp_path: Path) -> None:
    with Cluster(SchedulerConfig(), tmp_path, []) as cluster:

        async def collective() -> None:
            raise RemoteError("rank 0", "RuntimeError", "out of memory", "")

        with pytest.raises(RemoteError, match="out of memory"):
            cluster.wait(collective(), cause_seconds=0.01)
