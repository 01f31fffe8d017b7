"""Tests that share a service, or what their file keeps, run in one process."""

import re
from pathlib import Path

import pytest
from folder_scheduling import SECONDS, process_of

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("nodeid", "process"),
    [
        ("tests/live/gateway/test_gateway.py::test_a[x::y]", "gateway"),
        ("tests/live/deployed/test_turns.py::test_a", "large"),
        ("tests/live/elastic/test_certificate.py::test_a", "large"),
        ("tests/live/engines/test_weights.py::test_a[1]", "engines/test_weights.py"),
        ("tests/live/test_tls.py::test_a", "test_tls.py"),
        ("tests/live/simulated/test_turns.py::test_a", "simulated/test_turns.py"),
        ("tests/live/simulated/test_gateway.py::test_a", "simulated gateway"),
        ("tests/gpu/test_kernel.py::test_a", "gpu"),
        ("tests/app/test_model.py::test_a", "app/test_model.py"),
        ("tests/house/test_docs.py::test_a", "house"),
        ("tests/policies/test_kv_laws.py::test_a", "laws"),
        ("tests/policies/test_laws.py::test_a", "laws"),
    ],
)
def test_a_folder_or_a_file_is_one_process(nodeid, process):
    assert process_of(nodeid) == process


def test_processes_that_take_long_are_there():
    found = {process_of(f"tests/{path.relative_to(TESTS).as_posix()}") for path in TESTS.rglob("test_*.py")}
    assert set(SECONDS) <= found


def test_live_tests_lie_where_make_test_looks_for_them():
    marked = re.compile(r"^(@pytest\.mark|pytestmark = .*\bmark)\.(live|gpu)\b", re.MULTILINE)
    found = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py") if marked.search(path.read_text())}
    assert {"live"} <= found <= {"live", "gpu"}
