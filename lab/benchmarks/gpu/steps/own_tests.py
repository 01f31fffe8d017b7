"""Runs the repository's tests of GPUs that need neither Ray nor the demo model."""

import subprocess
import sys

from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.place import ROOT

FILES = ("tests/gpu/test_fused_on_gpu.py", "tests/gpu/test_v2_on_gpu.py")
LEFT_OUT = "test_an_engine_of_v2"
"""Name of a test that needs the demo model; the steps v1 and v2 replace it."""


def own_tests(step: Measurements) -> None:
    """Runs the tests. Without a GPU they are only collected."""
    step.tried("pytest", lambda: _pytest([] if step.place.card else ["--collect-only"]))


def _pytest(more: list[str]) -> dict:
    options = ["-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", f"not {LEFT_OUT}", "--durations=8", *more]
    command = [sys.executable, "-m", "pytest", *options, "-s", *FILES]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(found.stdout[-20_000:], found.stderr[-5_000:])
    if found.returncode:
        raise RuntimeError(f"pytest ended with {found.returncode}: {found.stdout[-2_000:]}")
    return {"tail": found.stdout[-1_500:]}
