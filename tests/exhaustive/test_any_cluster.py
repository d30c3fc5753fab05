"""A Ray cluster of several nodes that runs already: examined, deployed to, changed and left clean, by the commands."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import yaml
from ray.cluster_utils import Cluster

from serve_app.operations.local import checked_port
from tests.unit.actors.tiny_models import llama, save

LITTLE = "{num_cpus: 0.1, labels: {pool: POOL}}"
STORE_BYTES = 80 << 20
MINUTES = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes as an operator labels them, on one machine; only the head's Serve listens."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    node = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **node})
    for pool in ("target", "draft"):
        cluster.add_node(num_cpus=1, num_gpus=0, labels={"pool": pool}, object_store_memory=STORE_BYTES)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()
