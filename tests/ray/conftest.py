"""Ray clusters: two nodes on this machine, and two hosts. `make test-ray` runs these tests; `make test` does not."""

from collections.abc import Iterator
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from benchmarks.clusters import Hosts, RayCluster

NODE_CPUS = 4


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    settings = {"num_cpus": NODE_CPUS, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(2)
    hosts.up()
    yield hosts
    hosts.down()


@pytest.fixture(scope="session")
def ray_hosts(hosts: Hosts) -> Iterator[RayCluster]:
    cluster = RayCluster(hosts, NODE_CPUS)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
