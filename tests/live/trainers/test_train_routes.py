"""The learner replays the experts that the rollout chose. The rollout's choice here is not the model's own."""

from pathlib import Path

import pytest
import torch
from live.trainers.stand_in_experts import OtherExperts
from safetensors.torch import load_file

from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.run import train
from tailrace.app.train.task import read_task
from tailrace.app.train.train_config import TrainConfig
from tailrace.app.trl.route_replay import OWN, padded_routes
from tailrace.deployments.results.routed_experts import RoutedExperts

SAVED = "model.safetensors"
TASK = {"name": "chain_sum", "options": {"max_terms": 2, "max_digits": 1, "min_digits": 1}, "train": 4, "held_out": 0}
TASK |= {"chat": False, "reward": "reward_functions:length"}


@pytest.fixture(autouse=True)
def reward_functions(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])


def mismatch(moe_model_dir, path, tells: bool, **trainer) -> float:
    """The greatest distance of the trainer's logprobs from the rollout's, in a first step. Weights go as saved."""
    values = {"model": str(moe_model_dir), "task": TASK, "steps": 2, "groups": 2, "samples": 4, "max_tokens": 6}
    values |= {"mode": "sync", "rewards": {"timeout_s": 60}, "trainer": trainer, "trl": {"router_aux_loss_coef": 0.0}}
    config = TrainConfig.model_validate(values)
    service = OtherExperts(moe_model_dir, tells)
    outcome = train(service, config, read_task(config.task), RunFolder(path, config), lambda _: None)
    assert service.sent == {name: tuple(tensor.shape) for name, tensor in load_file(moe_model_dir / SAVED).items()}
    return outcome.rows[0].logprob_difference_max


@pytest.mark.parametrize("trainer", [{}, {"samples_per_pass": 2}])
def test_a_learner_has_the_rollouts_logprobs_where_results_have_routes(moe_model_dir, tmp_path, trainer):
    assert mismatch(moe_model_dir, tmp_path / "with", True, **trainer) < 1e-3
    assert mismatch(moe_model_dir, tmp_path / "without", False, **trainer) > 0.02


def test_a_row_without_routes_leaves_the_choice_to_the_model():
    (some, none) = padded_routes([RoutedExperts(torch.ones(2, 1, 2, dtype=torch.uint8).numpy()), None], [1, 0], 4)
    assert some[:, 0, 0].tolist() == [OWN, 1, 1, OWN] and none.eq(OWN).all()
