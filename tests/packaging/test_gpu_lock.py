"""The GPU lock resolves to the very files that it names. Needs a package index."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

LOCK = Path(__file__).resolve().parent.parent.parent / "requirements" / "gpu.txt"
LINE = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)==(?P<version>[0-9][0-9a-z.]*) --hash=sha256:(?P<sha256>[0-9a-f]{64})")
RESOLVE_LIMIT_S = 240

pytestmark = pytest.mark.package


def pip(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", *words, "--no-cache-dir", "--retries=0", "--timeout=15"]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=RESOLVE_LIMIT_S)


def test_the_gpu_lock_resolves_to_the_files_it_names(tmp_path):
    probe = pip("index", "versions", "click")
    if probe.returncode:
        pytest.skip(f"no package index is reachable: {probe.stderr.strip().splitlines()[-1]}")
    locked = [LINE.fullmatch(line) for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    pinned, report = tmp_path / "gpu.txt", tmp_path / "report.json"
    # Without the hashes, which would make pip fetch every wheel whole; === since a `+cpu` torch would satisfy ==.
    pinned.write_text("".join(f"{pin['name']}==={pin['version']}\n" for pin in locked))
    dry = ("install", "--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report", str(report))
    try:
        run = pip(*dry, "-r", str(pinned))
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package index did not answer everything in {RESOLVE_LIMIT_S} s")
    assert run.returncode == 0, run.stderr
    found = [item["download_info"]["archive_info"] for item in json.loads(report.read_text())["install"]]
    assert sorted(archive["hashes"]["sha256"] for archive in found) == sorted(pin["sha256"] for pin in locked)
