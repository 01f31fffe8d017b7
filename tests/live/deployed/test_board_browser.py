"""The board in a real browser, over a real service: a run on two replicas, one sample, a coordinator that is killed."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.lab.verification.disturbances import kill_actors

ROOT = Path(__file__).resolve().parents[3]
CHROMIUM = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
PYTHON = ROOT / ".venv-browser" / "bin" / "python"
MISSING = [str(path) for path in (*CHROMIUM, PYTHON) if not path.exists()]

needs_browser = pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: `make test-browser` installs them")


@pytest.fixture
def board(client):
    """The address of a `tailrace board` on the service."""
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tailrace", "board", "--address", address, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield next(found[0] for line in process.stderr if (found := re.findall(r"http://127\.0\.0\.1:\d+", line)))
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.browser
@needs_browser
def test_a_browser_sees_a_run_one_of_its_samples_and_a_coordinator_come_back(client, board, tmp_path):
    group = PromptGroup(prompt_id="sky", text="Count the stars:", samples=12, max_tokens=1_000)
    driver = [str(PYTHON), str(ROOT / "integrations/browser/drive.py"), board, str(tmp_path)]
    with (
        ThreadPoolExecutor(1) as threads,
        subprocess.Popen(driver, stdout=subprocess.PIPE, text=True) as browser,
    ):
        rolling = threads.submit(lambda: list(client.rollout_blocking(RolloutBatch(batch_id="seen", groups=(group,)))))
        seen = json.loads(browser.stdout.readline())
        kill_actors("Coordinator", no_restart=False)
        after = json.loads(browser.stdout.readline())
        (rolled,) = rolling.result()
    assert len(rolled.samples) == 12
    assert (seen["replicas"], seen["batches"]) == (2, ["seen"]) and seen["longest"] > 0
    assert seen["sample"]["name"].startswith("seen~") and (seen["sample"]["text"] or "ended" in seen["sample"]["said"])
    assert seen["sample"]["chunks"] and len(seen["updates_s"]) == 3
    assert seen["narrow_width"] <= 390 and seen["dark_paper"] != "rgb(255, 255, 255)"
    assert after["errors"] == [] and after["news"]
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("board", "sample", "narrow"))
