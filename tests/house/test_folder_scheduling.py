"""Live tests that share a service run in one process."""

import pytest
from folder_scheduling import process_of


@pytest.mark.parametrize(
    ("nodeid", "process"),
    [
        ("tests/live/gateway/test_gateway.py::test_a[x::y]", "gateway"),
        ("tests/live/deployed/test_turns.py::test_a", "large"),
        ("tests/live/elastic/test_certificate.py::test_a", "large"),
        ("tests/live/test_tls.py::test_a", "test_tls.py"),
        ("tests/gpu/test_kernel.py::test_a", "elsewhere"),
        ("tests/app/test_model.py::test_a", "elsewhere"),
    ],
)
def test_a_folder_is_one_process(nodeid, process):
    assert process_of(nodeid) == process
