"""Live tests that share a service run in one process."""

from pathlib import Path

import pytest
from folder_scheduling import SECONDS, process_of

LIVE = Path(__file__).parents[1] / "live"


@pytest.mark.parametrize(
    ("nodeid", "process"),
    [
        ("tests/live/gateway/test_gateway.py::test_a[x::y]", "gateway"),
        ("tests/live/deployed/test_turns.py::test_a", "large"),
        ("tests/live/elastic/test_certificate.py::test_a", "large"),
        ("tests/live/engines/test_weights.py::test_a[1]", "engines/test_weights.py"),
        ("tests/live/test_tls.py::test_a", "test_tls.py"),
        ("tests/gpu/test_kernel.py::test_a", "elsewhere"),
        ("tests/app/test_model.py::test_a", "elsewhere"),
    ],
)
def test_a_folder_is_one_process(nodeid, process):
    assert process_of(nodeid) == process


def test_processes_that_take_long_are_there():
    found = {process_of(f"tests/live/{path.relative_to(LIVE).as_posix()}") for path in LIVE.rglob("test_*.py")}
    assert set(SECONDS) <= found
