"""`bench control` from end to end, small: real Serve, a real actor, a real master, each with figures that can be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ("--calls", "64", "--keys", "640", "--samples", "1024", "--json")


@pytest.mark.long
def test_every_part_is_measured_and_reported():
    command = [sys.executable, "-m", "tailrace", "bench", "control", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for part in ("serve_call", "serve_chunk", "serve_poll", "actor_call", "actor_exchange", "zeromq"):
        assert 0 < found[part]["round_trip_us"]["median"] <= found[part]["round_trip_us"]["p99"], part
        assert f"{part}: " in done.stderr, "progress"
    for part in ("serve_call", "serve_chunk", "actor_call", "actor_exchange"):
        both_us = found[part]["caller_us"] + found[part]["callee_us"]
        assert found[part]["calls_per_s"] > 0 < both_us
    for part in ("serve_stream", "actor_stream"):
        for way in (found[part], found[part]["apart"]):
            assert way["items_per_s"] > 0 < way["caller_us"] + way["callee_us"]
        assert found[part]["delay_us"]["median"] <= found[part]["delay_us"]["p99"] and f"{part}: " in done.stderr
    assert found["serve_poll"]["replicas"] == 4
    pool = found["pool_key"]
    for operation in ("put", "exist", "get", "remove"):
        assert pool[operation]["client_us"]["median"] > 0 and pool[operation]["master_us"] >= 0
    assert pool["keys"] == 640 and found["core"]["decision_us"] > 0 < found["result_token"]["us"]
