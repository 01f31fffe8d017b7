"""Store and master killed under a rollout in which every sample moves: all samples end, and no token is another."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KILLS = ("store_killed_busy", "master_killed")


@pytest.fixture(scope="module")
def runs(model_dir):
    """What the command reports, by disturbance. Its exit code is not looked at: it depends on how busy this machine is.

    Nothing here is about time.
    """
    only = [part for name in KILLS for part in ("--only", name)]
    command = (sys.executable, "-m", "app", "pool", "chaos", "--samples", "2", "--max-tokens", "80", "--json", *only)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["samples"] == 16
    return {run["name"]: run for run in result["runs"]}


def test_undisturbed_the_samples_go_through_the_pool(runs):
    assert runs["undisturbed"]["counts"]["pool_tokens"] > 0
    assert not [name for name in runs["undisturbed"]["counts"] if name.endswith("_lost")]


@pytest.mark.parametrize("name", KILLS)
def test_every_sample_ends_with_the_tokens_of_the_undisturbed_run(runs, name):
    run = runs[name]
    assert (run["samples_ended"], run["failed"]) == (16, 0)
    assert run["identical"], run["first_difference"]


@pytest.mark.parametrize("name", KILLS)
def test_the_counts_say_what_was_lost(runs, name):
    run = runs[name]
    assert run["done"].startswith("kill") and run["counts"]["lost"] > 0, "the coordinator saw that KV was lost"
    causes = {count.rpartition(".")[2] for count in run["counts"] if "_failed." in count}
    assert causes & {"store_lost", "master_lost", "gone", "full", "lease_expired"}, run["counts"]
    assert any(count.startswith("recomputed_tokens.") for count in run["counts"]), "and what was computed again"
