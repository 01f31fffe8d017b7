"""The service of the tiny model, with a gateway, that the tests of this folder share. They leave any weights."""

import pytest
from gateway_service import caller, gateway, slots


@pytest.fixture(scope="package")
def address(tiny_model, tmp_path_factory):
    before = slots()
    with gateway(tiny_model, tmp_path_factory.mktemp("gateway")) as found:
        yield found
    assert set(slots()) <= set(before), "nothing of the service is left in shared memory"


@pytest.fixture(scope="package")
def client(address):
    return address[1]


@pytest.fixture(scope="package")
def http(address):
    with caller(address[0], "trainer") as client:
        yield client
