"""Runs of the learner with TRL's real trainer. A model in this process answers for the service."""

from pathlib import Path

import pytest
from live.trainers.stand_in import StandIn

from tailrace.app.files.figures import PICTURE
from tailrace.app.files.output_file import OutputFile
from tailrace.app.train.evaluation import HELD_OUT_STEPS
from tailrace.app.train.record.picture import draw
from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.run import train
from tailrace.app.train.task import read_task
from tailrace.app.train.train_config import TrainConfig

TASK = {"name": "chain_sum", "options": {"max_terms": 2, "max_digits": 1, "min_digits": 1}, "train": 12, "held_out": 3}
TASK |= {"chat": False, "reward": "reward_functions:length"}


def config_of(model, **changes) -> TrainConfig:
    values = {
        "model": str(model), "task": TASK, "steps": 4, "groups": 2, "samples": 4, "max_tokens": 5,
        "learning_rate": 1e-3, "checkpoint_every": 2, "rewards": {"timeout_s": 60},
    }  # fmt: skip
    return TrainConfig.model_validate(values | changes)


def run(config, path, say=lambda text: None):
    service = StandIn(config.model)
    return train(service, config, read_task(config.task), RunFolder(path, config), say), service


@pytest.fixture(scope="module", autouse=True)
def reward_functions():
    """The folder that has them is on the path, also in the processes of the pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parents[2])
        yield


@pytest.fixture(scope="module")
def straight(small_model, tmp_path_factory):
    """A run that is never stopped."""
    path = tmp_path_factory.mktemp("straight")
    said = []
    outcome, service = run(config_of(small_model), path, said.append)
    return outcome, service, said


def test_a_run_has_a_row_a_step_and_accuracies_before_and_after(straight):
    outcome, service, said = straight
    assert [row.step for row in outcome.rows] == [1, 2, 3, 4]
    assert [(each.step, each.questions) for each in outcome.accuracies] == [(0, 3), (4, 3)]
    for row in outcome.rows:
        assert (row.groups, row.samples, row.rewards_failed, row.rewards_timed_out) == (2, 8, 0, 0)
        assert 8 <= row.tokens <= 40 and len(row.longest) == 2
        assert (row.staleness.mean, row.staleness.max) == (0.0, 0)
        assert row.logprob_difference_max < 1e-3 and row.logprob_kl < 1e-5
        seconds = row.seconds.model_dump()
        assert seconds.pop("step") == pytest.approx(sum(seconds.values()))
    assert len({row.weights_checksum for row in outcome.rows}) == 4
    held_out = [batch.step - HELD_OUT_STEPS for batch in service.batches if batch.step >= HELD_OUT_STEPS]
    assert held_out == [0, 0, 4, 4], "first and last; greedy and sampled"
    assert [batch.step for batch in service.batches if batch.step < HELD_OUT_STEPS] == [0, 1, 2, 3]
    assert sum("step 3/4" in text for text in said) == 1


def test_a_stopped_run_continues_to_the_same_weights_from_groups_on_disk(straight, small_model, tmp_path):
    def stop_after_three(text):
        if text.startswith("step 3/4"):
            raise KeyboardInterrupt

    config = config_of(small_model)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", stop_after_three)
    outcome, service = run(config, tmp_path / "run")
    wanted = straight[0]
    assert [row.weights_checksum for row in outcome.rows] == [row.weights_checksum for row in wanted.rows]
    assert [row.loss for row in outcome.rows] == [row.loss for row in wanted.rows]
    assert [row.grad_norm for row in outcome.rows] == [row.grad_norm for row in wanted.rows]
    assert outcome.accuracies == wanted.accuracies
    steps = [batch.step for batch in service.batches if batch.step < HELD_OUT_STEPS]
    assert steps == [3], "step 2 of the trainer was on disk"

    longer, _ = run(config_of(small_model, steps=5), tmp_path / "run")
    assert [row.step for row in longer.rows] == [1, 2, 3, 4, 5]
    again, service = run(config_of(small_model, steps=5), tmp_path / "run")
    assert again.rows == longer.rows and not service.batches


def test_another_seed_gives_other_weights(straight, small_model, tmp_path):
    outcome, _ = run(config_of(small_model, seed=1, steps=1), tmp_path / "run")
    assert outcome.rows[0].weights_checksum != straight[0].rows[0].weights_checksum


def test_rewards_that_fail_are_counted_and_train_on(small_model, tmp_path):
    task = TASK | {"held_out": 0, "reward": "reward_functions:broken"}
    outcome, _ = run(config_of(small_model, task=task, steps=1), tmp_path / "run")
    assert (outcome.rows[0].rewards_failed, outcome.rows[0].reward_mean) == (8, 0.0)
    assert outcome.accuracies == []


def test_the_picture_is_drawn(straight, tmp_path):
    draw(straight[0].rows, straight[0].accuracies, OutputFile(tmp_path / "curve.png", "--out", PICTURE))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
