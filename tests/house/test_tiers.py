"""The tier rules of conftest.py, tried on a small project: whatever ran or was collected before, pure stays pure."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "ray/__init__.py": "",
    "tailrace/__init__.py": "",
    "tailrace/heavy.py": "import ray\n",
    "tests/live/test_a.py": "import ray\nimport tailrace.heavy\ndef test_live():\n    import ray.sub\n",
    "ray/sub.py": "",
    "tests/test_inside.py": "def test_direct():\n    import ray\ndef test_through():\n    import tailrace.heavy\n"
    "def test_sub():\n    from ray.sub import __name__\n",
    "tests/test_mixed.py": "import pytest\n@pytest.mark.live\ndef test_late():\n    import ray, tailrace.heavy\n"
    "def test_light():\n    pass\n",
    "tests/test_top.py": "import tailrace.heavy\ndef test_never():\n    pass\n",
    "tests/test_long.py": "import pytest\n@pytest.mark.long\ndef test_an_hour():\n    pass\n",
}


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = live\n    gpu\n    long\npythonpath = .\n")
    return tmp_path


def outcomes(project, *options):
    """Of a run that continues without the file that cannot be imported."""
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-vv",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "tests",
        *options,
    )
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # the outer run's choice
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer to load than all this to run
    out = subprocess.run(command, cwd=project, env=own, check=False, capture_output=True, text=True).stdout
    lines = [line.split() for line in out.splitlines() if "::" in line and "%]" in line]
    return [(words[0].rpartition("::")[2], words[1]) for words in lines], out


def test_pure_tests_cannot_import_ray_and_run_first(project):
    ran, out = outcomes(project)
    assert dict(ran) == {
        "test_direct": "FAILED",
        "test_through": "FAILED",
        "test_sub": "FAILED",
        "test_light": "PASSED",
        "test_live": "PASSED",
        "test_late": "PASSED",
    }, out
    assert {name for name, _ in ran[-2:]} == {"test_live", "test_late"}
    refused = out.partition("ERROR collecting tests/test_top.py")[2].partition("FAILURES")[0]
    assert "a pure test must not import ray" in refused, "at a pure file's top"
    assert out.count("ERROR collecting") == 1


def test_long_tests_run_where_they_are_asked_for(project):
    ran, out = outcomes(project, "--long", "-m", "long")
    assert ran == [("test_an_hour", "PASSED")], out
