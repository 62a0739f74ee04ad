"""A cluster of two hosts, and a driver on its login node. `make test-slurm` runs these tests; `make test` does not."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.clusters import Hosts, SlurmCluster, missing_programs


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    assert os.getuid() == 0, "hosts in namespaces need root"
    assert not missing_programs(), f"install {missing_programs()}; make test-slurm does"
    hosts = Hosts(2)
    hosts.up()
    yield hosts
    hosts.down()


@pytest.fixture(scope="session")
def cluster(hosts: Hosts) -> Iterator[SlurmCluster]:
    # Not in /tmp, of which each host has its own, and by a short name, since there are sockets in it.
    with tempfile.TemporaryDirectory(prefix="areal-slurm-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        cluster = SlurmCluster(Path(directory), hosts)
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()
