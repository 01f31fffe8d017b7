"""Store and master killed under a rollout in which every sample moves: all samples end, and no token is another."""

import json
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import pytest
from waiting import WAIT_S

from tailrace.app.cli import run
from tailrace.app.config import load_config

KILLS = ("store_killed_busy", "master_killed")


@pytest.fixture(scope="module")
def runs(client, config_path):
    """What the command reports, by disturbance. Its exit code is not looked at: it depends on how busy this machine is.

    Nothing here is about time.
    """

    @contextmanager
    def shared(wanted, address):
        """The service that is there, which must be the one that the command would start."""
        assert wanted == load_config(config_path) and address is None
        yield client

    only = [part for name in KILLS for part in ("--only", name)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.setattr("tailrace.lab.verification.chaos.service", shared)
        for limit in ("HEAL_S", "RUN_S"):
            patch.setattr(f"tailrace.lab.verification.chaos.{limit}", WAIT_S)
        what = ["--config", str(config_path), "--samples", "2", "--max-tokens", "160", "--json", *only]
        run(["pool", "chaos", *what])
    result = json.loads(said.getvalue().splitlines()[-1])
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
