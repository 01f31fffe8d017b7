"""TRL's `AsyncGRPOTrainer` with its own rollout worker, in a process without Ray, against a gateway."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_service import TOKENS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.long
def test_the_example_trains_three_steps_on_samples_of_its_own_weights(address, tiny_model, tmp_path):
    url, client = address
    before = client.status_blocking().weights_version
    trainer = url.replace("http://", f"http://trainer:{TOKENS['trainer']}@")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "trl_over_http.py"), trainer, str(tiny_model)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"^ratio (\S+) staleness (\S+)$", done.stdout, re.MULTILINE)
    assert [float(ratio) for ratio, _ in steps] == pytest.approx([1, 1, 1], abs=1e-2)
    assert all(float(staleness) <= 1 for _, staleness in steps)
    assert client.status_blocking().weights_version == before + 4, "before the first step, and after each"
