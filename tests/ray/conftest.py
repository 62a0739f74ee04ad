"""A Ray cluster of two nodes on this machine. `make test-ray` runs these tests; `make test` does not."""

from collections.abc import Iterator
from typing import Any

import pytest
from ray.cluster_utils import Cluster

NODE_CPUS = 4


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    settings = {"num_cpus": NODE_CPUS, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()
