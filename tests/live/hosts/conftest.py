"""A Ray cluster on three hosts of this machine, made by `ray up`, with the service on it, made by `serve deploy`."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from hosts.cluster import UserCluster, checkout, cluster_file, machine_environment, write_service
from hosts.namespaces import Network, missing


@pytest.fixture(scope="session")
def cluster(model_dir, tmp_path_factory):
    if (reason := missing()) is not None:
        pytest.skip(f"hosts of this machine: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="tailrace-hosts-", dir="/var/tmp"))  # /tmp is a host's own
    network = Network(folder)
    shared = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), model_dir]
    cores = sorted(os.sched_getaffinity(0))
    try:
        head = network.add("head", set(cores), shared)
        workers = [network.add(f"engine-{i}", {cores[i % len(cores)]}, shared) for i in range(2)]
        for host in network.hosts.values():
            host.start()
        environment = machine_environment(folder)
        user = UserCluster(head, workers, cluster_file(checkout(folder), network), environment)
        user.up()
        write_service(head, model_dir)
        user.deploy()
        yield user
    finally:
        network.close()
        shutil.rmtree(folder)
