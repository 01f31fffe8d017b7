"""A short soak of the smallest service: every kind of fault once, nothing lost, nothing wrong, nothing left over."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tailrace.app.config import DEFAULT_CONFIG

ROOT = Path(__file__).parent.parent.parent

KINDS = "coordinator_killed,trainer_killed,store_killed,replica_killed,kv_bits_flipped,context_shard_killed"


@pytest.fixture
def config(tiny_model, tmp_path) -> Path:
    """The default one with the tiny model."""
    content = yaml.safe_load(DEFAULT_CONFIG.read_text())
    args = content["applications"][0]["args"]
    args["engine"] |= {"model": str(tiny_model), "max_model_len": 1024, "kv_cache_gib": 0.25}
    args["pool"]["dram_gib"] = 0.5
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def soak(config: Path, out: Path, *more: str) -> subprocess.Popen:
    command = (sys.executable, "-m", "tailrace", "soak", "--config", str(config), "--out", str(out), "--json", *more)
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_short_soak_loses_nothing_and_leaves_nothing(config, tmp_path):
    running = soak(config, tmp_path / "out", "--minutes", "1.5", "--gap-s", "8", "14", "--kinds", KINDS)
    said, errors = running.communicate(timeout=900)
    assert running.returncode == 0, errors
    report = json.loads(said.splitlines()[-1])
    assert report["lost"] == report["wrong"] == report["left_over"] == 0 and not report["failed"]
    assert report["samples"] > 50 and report["updates"] > 1 and len(report["faults"]) > 3
    assert {row["role"] for row in report["memory"]["processes"]} >= {"soak", "Engine", "Coordinator", "raylet"}
    assert report == json.loads((tmp_path / "out" / "soak.json").read_text())
    assert (tmp_path / "out" / "soak.html").read_text().count("<svg") >= 2


@pytest.mark.long
def test_an_interrupted_soak_ends_with_its_report(config, tmp_path):
    running = soak(config, tmp_path / "out", "--minutes", "60")
    for line in running.stderr:
        if " of 60:00: " in line:
            break
    running.send_signal(signal.SIGINT)
    said, errors = running.communicate(timeout=300)
    report = json.loads(said.splitlines()[-1])
    assert report["stopped"] and report["lost"] == report["wrong"] == report["left_over"] == 0, errors
    assert running.returncode == (0 if report["samples"] and not report["driver_errors"] else 1)
