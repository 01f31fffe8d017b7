"""The service that the tests of this folder share: started for the first of them, gone without a trace at the end."""

import asyncio

import pytest
from waiting import until

from tailrace.app.cluster import service
from tailrace.app.config import load_config
from tailrace.lab.verification.leftovers import processes_of


@pytest.fixture(scope="package")
def client(model_dir):
    with service(load_config(), None) as client:
        master = until(lambda: asyncio.run(client.status()).pool.status)["master_address"]
        assert processes_of(master)
        yield client
    until(lambda: not processes_of(master))
