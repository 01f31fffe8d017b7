"""The service of the tiny model, with a gateway, that the tests of this folder share. They leave any weights.

Ray collects metrics, which `test_metrics_live.py` reads.
"""

import pytest
from gateway_service import TOKENS, caller, gateway, slots, slots_service
from listening_sockets import open_sockets

RAYS = {"RAY_enable_metrics_collection": "true", "RAY_metrics_report_interval_ms": "5000"}


@pytest.fixture(scope="package")
def before() -> set[tuple[int, str, int]]:
    """Sockets that were open before the service started."""
    return open_sockets()


@pytest.fixture(scope="package")
def address(tiny_model, tmp_path_factory, before):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAYS.items():
            patch.setenv(name, value)
        with gateway(tiny_model, tmp_path_factory.mktemp("gateway")) as found:
            service = slots_service()
            yield found
    assert slots(service) == [], "nothing of the service is left in shared memory"


@pytest.fixture(scope="package")
def client(address):
    return address[1]


@pytest.fixture(scope="package")
def http(address):
    with caller(address[0], "trainer") as client:
        yield client


@pytest.fixture(scope="package")
def trainer_url(address) -> str:
    """The gateway's address with a trainer's token: clients send it by themselves."""
    return address[0].replace("http://", f"http://trainer:{TOKENS['trainer']}@")
