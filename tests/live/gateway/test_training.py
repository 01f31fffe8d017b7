"""A real service under TRL's example script, as written, and under runs of the learner."""

import runpy
import sys
from pathlib import Path

import pytest
from live.trainers.test_run import TASK

from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.run import train
from tailrace.app.train.task import read_task
from tailrace.app.train.train_config import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "trl_grpo.py"


@pytest.fixture(scope="module", autouse=True)
def on_its_weights(client, tiny_model):
    """The service has those that the trainers begin with, and reward functions are found, also by their processes."""
    client.update_weights_blocking(client.status_blocking().weights_version + 1, str(tiny_model))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests")
        yield


def test_the_example_script_trains_on_a_real_service(client, tiny_model, tmp_path, monkeypatch):
    before = client.status_blocking().weights_version
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tiny_model)])
    names = runpy.run_path(str(SCRIPT), run_name="__main__")
    assert client.status_blocking().weights_version == before + 2
    history = [row for row in names["trainer"].state.log_history if "loss" in row]
    assert len(history) == 2
    for row in history:  # engine and trainer compute the same law, to the noise of floating point
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert row["sampling/sampling_logp_difference/max"] == pytest.approx(0, abs=1e-3)


def trained(client, model, path, **changes):
    values = {
        "model": str(model), "task": TASK | {"held_out": 2}, "steps": 3, "groups": 3, "samples": 4, "max_tokens": 40,
        "learning_rate": 1e-4, "checkpoint_every": 2, "rewards": {"timeout_s": 60},
    }  # fmt: skip
    config = TrainConfig.model_validate(values | changes)
    return train(client, config, read_task(config.task), RunFolder(path, config), lambda text: None).rows


@pytest.fixture(scope="module")
def by_turns(client, tiny_model, tmp_path_factory):
    return trained(client, tiny_model, tmp_path_factory.mktemp("sync") / "run", mode="sync")


@pytest.mark.long
def test_overlap_on_shared_cores_has_the_bits_of_turns(client, tiny_model, tmp_path, by_turns):
    shared = {"shares_cores": True, "max_held_gradients": 2}
    rows = trained(client, tiny_model, tmp_path / "run", mode="overlap", trainer=shared)
    assert [row.weights_checksum for row in rows] == [row.weights_checksum for row in by_turns]
    assert [(row.loss, row.grad_norm) for row in rows] == [(row.loss, row.grad_norm) for row in by_turns]


def test_the_ledger_of_a_real_service_adds_up(by_turns):
    for row in by_turns:
        assert 0 <= row.idle_replica_s <= row.replica_s and row.given_back_s == 0
        assert row.drafted_tokens >= row.accepted_tokens and row.verifications > 0
        assert row.logprob_difference_max < 1e-3 and row.staleness.max == 0
    # A step may be shorter than an engine's pause between two reports, and status takes a while: hence the sums.
    steps_s, up_s, idle_s = (sum(of) for of in zip(*map(spent, by_turns), strict=True))
    assert up_s == pytest.approx(2 * steps_s, rel=0.45), "two replicas were up, not one, nor three"
    assert 0 < idle_s < up_s


def spent(row) -> tuple[float, float, float]:
    return row.seconds.step, row.replica_s, row.idle_replica_s


@pytest.mark.parametrize(("mode", "greatest"), [("one_step_off", 1), ("bounded", 2)])
def test_steps_ahead_are_of_weights_that_are_known(client, tiny_model, tmp_path, mode, greatest):
    rows = trained(client, tiny_model, tmp_path / "run", mode=mode)
    assert max(row.staleness.max for row in rows) in range(1, greatest + 1)
