"""The certificate on a small workload, with its last run corrupted: all others identical, the corruption found."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_run_is_identical_and_a_corruption_is_named(model_dir, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = (ROOT / "app" / "demo" / "prompts.jsonl").read_text().splitlines()[:4]
    prompts.write_text("\n".join(lines))
    what = ("--prompts", str(prompts), "--samples", "3", "--max-tokens", "64", "--only", "runs", "--corrupt", "--json")
    done = subprocess.run(
        (sys.executable, "-m", "app", "verify", *what),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    runs = {run["name"]: run for run in result["runs"]}
    assert len(runs) == 10 and result["tokens"] > 500 and not result["identical"]
    *others, (last_name, last) = runs.items()
    assert all(run["identical"] for _, run in others), others
    assert last["first_difference"]["what"] == "token"
    at = last["first_difference"]
    named = f"{last_name} differs: prompt {at['prompt_id']!r} sample {at['sample_index']} position {at['position']}"
    assert named in done.stderr
    assert runs["moved"]["moved_samples"] > 0 and runs["chunks_of_23"]["chunked_share"] > 0
    assert runs["raced"]["races"] > 0
    assert all(run["drafted_tokens"] > 0 for name, run in runs.items() if name != "plain")
    assert runs["plain"]["drafted_tokens"] == 0
    assert "actors of the group context" in runs["raced"]["note"]
    assert "killed replica" in runs["replica_killed"]["note"]
    assert "killed replica" in runs["pulled_after_stop"]["note"] and runs["pulled_after_stop"]["pulled_tokens"] > 0
