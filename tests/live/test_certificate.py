"""The certificate on a small workload, with its last run corrupted: all others identical, the corruption found.

Of the ways to roll out these are the ones that one service can take and that other live tests do not compare with plain
decoding (`test_drafter_live.py` does so with draft models); `python -m app verify` takes them all.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("raced", "scaled_down", "replica_killed")


def test_every_run_is_identical_and_a_corruption_is_named(model_dir, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = (ROOT / "app" / "demo" / "prompts.jsonl").read_text().splitlines()[:4]
    prompts.write_text("\n".join(lines))
    what = ["--prompts", str(prompts), "--samples", "3", "--max-tokens", "72", "--only", "runs", "--corrupt", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "app", "verify", *what, *(part for name in NAMES for part in ("--runs", name))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    runs = {run["name"]: run for run in result["runs"]}
    assert list(runs) == ["plain", *NAMES] and result["tokens"] > 500 and not result["identical"]
    *others, (last_name, last) = runs.items()
    assert all(run["identical"] for _, run in others), others
    assert last["first_difference"]["what"] == "token"
    at = last["first_difference"]
    named = f"{last_name} differs: prompt {at['prompt_id']!r} sample {at['sample_index']} position {at['position']}"
    assert named in done.stderr
    assert runs["plain"]["drafted_tokens"] == runs["plain"]["moved_samples"] == 0
    assert runs["raced"]["races"] > 0 and "actors of the group context" in runs["raced"]["note"]
    assert runs["scaled_down"]["moved_samples"] > 0
    assert "2 replicas became 1 while" in runs["scaled_down"]["note"]
    assert runs["replica_killed"]["pulled_tokens"] > 0 and "killed replica" in runs["replica_killed"]["note"]
