"""The learner replays the experts that the rollout chose. The rollout's choice here is not the model's own."""

from pathlib import Path

import pytest
import torch
from live.trainers.stand_in import StandIn
from moe_model import CHOSEN, EXPERTS, LAYERS, make_moe_model
from safetensors.torch import load_file

from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.route_replay import OWN, padded_routes, replayed_routes
from tailrace.app.train.run import train
from tailrace.app.train.task import read_task
from tailrace.app.train.train_config import TrainConfig
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.results.routed_experts import RoutedExperts

SAVED = "model.safetensors"
TASK = {"name": "chain_sum", "options": {"max_terms": 2, "max_digits": 1, "min_digits": 1}, "train": 4, "held_out": 0}
TASK |= {"chat": False, "reward": "reward_functions:length"}


class OtherExperts(StandIn):
    """Answers have the logprobs of experts next to those that the model would choose. `tells`: they have them, too;
    one sample of each group has none, and its own logprobs.
    """

    def __init__(self, model: Path, tells: bool):
        super().__init__(model)
        self.tells = tells

    @torch.no_grad()
    def _sample(self, batch, group, index: int):
        drawn = super()._sample(batch, group, index)
        if index == 0:
            return drawn
        ids = torch.tensor([[*group.token_ids, *drawn.token_ids]])
        own = self.model(ids, output_router_logits=True).router_logits
        routes = torch.zeros(ids.shape[1] - 1, LAYERS, CHOSEN, dtype=torch.uint8)
        for layer, logits in zip((0, 2), own, strict=True):
            routes[:, layer] = (logits.topk(CHOSEN).indices[:-1] + 1) % EXPERTS
        found = RoutedExperts(routes.numpy())
        with replayed_routes(self.model, padded_routes([found], [0], ids.shape[1])):
            law = self.model(ids).logits[0, :-1].double().log_softmax(-1)
        made = law.gather(1, ids[0, 1:, None])[-len(drawn.token_ids) :, 0].tolist()
        told = {"routed_experts": found} if self.tells else {}
        return drawn.model_copy(update={"logprobs": tuple(made), "raw_logprobs": tuple(made)} | told)

    def send_weights_blocking(self, version: int, tensors) -> WeightsLoaded:
        self.version, self.sent = version, {name: tuple(tensor.shape) for name, tensor in tensors}
        return WeightsLoaded(version=version, digest="0" * 16, replicas=("one",))


@pytest.fixture(scope="module")
def folder(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "model"
    make_moe_model(folder, model_dir)
    return folder


@pytest.fixture(autouse=True)
def reward_functions(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])


def mismatch(folder, path, tells: bool, **trainer) -> float:
    """The greatest distance of the trainer's logprobs from the rollout's, in a first step. Weights go as saved."""
    values = {"model": str(folder), "task": TASK, "steps": 2, "groups": 2, "samples": 4, "max_tokens": 6}
    values |= {"mode": "sync", "rewards": {"timeout_s": 60}, "trainer": trainer, "trl": {"router_aux_loss_coef": 0.0}}
    config = TrainConfig.model_validate(values)
    service = OtherExperts(folder, tells)
    outcome = train(service, config, read_task(config.task), RunFolder(path, config), lambda _: None)
    assert service.sent == {name: tuple(tensor.shape) for name, tensor in load_file(folder / SAVED).items()}
    return outcome.rows[0].logprob_difference_max


@pytest.mark.parametrize("trainer", [{}, {"samples_per_pass": 2}])
def test_a_learner_has_the_rollouts_logprobs_where_results_have_routes(folder, tmp_path, trainer):
    assert mismatch(folder, tmp_path / "with", True, **trainer) < 1e-3
    assert mismatch(folder, tmp_path / "without", False, **trainer) > 0.02


def test_a_row_without_routes_leaves_the_choice_to_the_model():
    (some, none) = padded_routes([RoutedExperts(torch.ones(2, 1, 2, dtype=torch.uint8).numpy()), None], [1, 0], 4)
    assert some[:, 0, 0].tolist() == [OWN, 1, 1, OWN] and none.eq(OWN).all()
