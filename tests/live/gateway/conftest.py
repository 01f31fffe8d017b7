"""The service with a gateway that the tests of this folder share. They leave any weights."""

import pytest
from gateway_service import caller, gateway


@pytest.fixture(scope="package")
def address(tiny_model, tmp_path_factory):
    with gateway(tiny_model, tmp_path_factory.mktemp("gateway")) as found:
        yield found


@pytest.fixture(scope="package")
def http(address):
    with caller(address[0], "trainer") as client:
        yield client
