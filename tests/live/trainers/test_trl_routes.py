"""An attached `trl.GRPOTrainer` replays the experts that the rollout chose, which here are not the model's own."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from live.trainers.stand_in_experts import OtherExperts
from live.trainers.test_attach import logged, trainer_of, weights
from live.trainers.test_processes import played
from live.trainers.test_tools import Scripted, tool_trainer
from live.trainers.watched_trainer import WatchedTrainer
from moe_model import chosen_experts

from tailrace import attach
from tailrace.app.cluster import service as service_of
from tailrace.app.config import DEFAULT_CONFIG, load_config, with_engine
from tailrace.app.errors import BadInput
from tailrace.app.trl.row_routes import RowRoutes

PROCESS = Path(__file__).with_name("process_with_routes.py")
OLD = "sampling/sampling_logp_difference/max"
SHARE = "sampling/samples_with_routes"
NEAR, FAR = 1e-3, 0.02
"""Nats: the same experts in float32, and others."""

IN_PARTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
"""TRL shuffles the samples of two prompts, and has two losses a step."""


def trained(model, tmp_path, tells=True, **settings):
    trainer = trainer_of(model, tmp_path, kind=WatchedTrainer, **({"max_steps": 1} | settings))
    attach(trainer, OtherExperts(model, tells))
    trainer.train()
    return trainer


@pytest.mark.parametrize("settings", [{}, IN_PARTS, {"num_iterations": 2, "learning_rate": 0.0, "max_steps": 2}])
def test_both_passes_have_the_rollouts_logprobs(moe_model_dir, tmp_path, settings):
    trainer = trained(moe_model_dir, tmp_path, **settings)
    assert len(trainer.differences) == settings.get("gradient_accumulation_steps", settings.get("max_steps", 1))
    assert trainer.greatest < NEAR and max(logged(trainer, OLD)) < NEAR
    assert logged(trainer, SHARE) == [0.75], "one sample of each group has none, and the model's own logprobs"


def test_without_routes_the_routers_choose_for_themselves(moe_model_dir, tmp_path):
    trainer = trained(moe_model_dir, tmp_path, tells=False)
    assert trainer.greatest > FAR and max(logged(trainer, OLD)) > FAR and not logged(trainer, SHARE)


@pytest.mark.parametrize(("is_reentrant", "noise"), [(False, 0), (True, 5e-4)])
def test_layers_that_are_computed_again_have_the_same_gradient(moe_model_dir, tmp_path, is_reentrant, noise):
    """The other kind adds gradients in another order; the greatest change of a weight is 0.6."""
    found = []
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": is_reentrant}}
    for settings in ({}, again):
        trainer = trained(moe_model_dir, tmp_path / str(len(found)), optim="sgd", learning_rate=10.0, **settings)
        assert trainer.greatest < NEAR
        found.append(weights(trainer))
    start = weights(trainer_of(moe_model_dir, tmp_path / "start"))
    assert all(torch.allclose(found[0][name], found[1][name], rtol=0, atol=noise) for name in start)
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(found[0][router], start[router], atol=1e-3), "its gates have a gradient"


def test_evaluation_replays_too_and_a_reference_model_does_not(moe_model_dir, tmp_path):
    trainer = trained(moe_model_dir, tmp_path, beta=0.1, learning_rate=0.0)
    assert trainer.greatest < NEAR
    (kl,) = logged(trainer, "kl")
    assert kl > 1e-4, "of equal weights, by other experts"
    trainer.differences.clear()
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert trainer.greatest < NEAR
    trainer.ref_model = None
    with pytest.raises(BadInput, match="the reference model is the trained one without its adapter: set beta to 0"):
        trainer.evaluate(trainer.train_dataset.select(range(2)))


def test_replay_ends_with_its_step(moe_model_dir, tmp_path):
    trainer, service = trained(moe_model_dir, tmp_path, learning_rate=0.0), OtherExperts(moe_model_dir, True)
    ids = torch.tensor([[5, 300, 7, 41]])
    with torch.no_grad():
        assert torch.allclose(trainer.model(ids).logits, service.model(ids).logits, atol=1e-4)


class HalfTrainer(WatchedTrainer):
    """Trains on every other sample."""

    def _generate_and_score_completions(self, inputs):
        whole = super()._generate_and_score_completions(inputs)
        return {name: value[::2] if value.ndim else value for name, value in whole.items()}


def test_a_trainer_that_leaves_samples_out_is_refused(moe_model_dir, tmp_path):
    trainer = trainer_of(moe_model_dir, tmp_path, kind=HalfTrainer, max_steps=1)
    attach(trainer, OtherExperts(moe_model_dir, tells=True))
    with pytest.raises(BadInput, match="HalfTrainer trains on some of its samples alone"):
        trainer.train()


class RoutedTools(OtherExperts, Scripted):
    """Scripted answers, all of them with routes."""

    OWN = None


def test_a_row_of_several_turns_has_the_routes_of_all(moe_model_dir, tmp_path):
    called = []
    trainer = tool_trainer(moe_model_dir, tmp_path, called, kind=WatchedTrainer)
    attach(trainer, RoutedTools(moe_model_dir, tells=True))
    trainer.train()
    assert called == [(6, 7), (6, 7)]
    assert trainer.greatest < NEAR and max(logged(trainer, OLD)) < NEAR and logged(trainer, SHARE) == [1]


def test_each_process_replays_the_routes_of_its_rows(moe_model_dir, tmp_path):
    ended = played(moe_model_dir, tmp_path, program=PROCESS)
    assert [one.returncode for one in ended] == [0, 0], ended
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (first["asked"], second["asked"]) == (1, 0)
    assert max(first["losses"], second["losses"], *first["old"]) < NEAR


def law_distance(trainer) -> float:
    """The mean over tokens of TRL's estimate of KL between the rollout's law and the losses'."""
    difference = torch.cat(trainer.differences)
    return float((difference.exp() - 1 - difference).mean())


@pytest.fixture(scope="module")
def client(moe_model_dir):
    """A client of a real service whose engines keep routes."""
    engine = {"model": str(moe_model_dir), "kv_cache_gib": 0.25, "max_model_len": 512}
    file = with_engine(load_config(DEFAULT_CONFIG), engine | {"vllm_args": {"enable_return_routed_experts": True}})
    with service_of(file, None) as client:
        yield client


IN_BFLOAT16 = {"bf16": True, "gradient_checkpointing": True, "router_aux_loss_coef": 0.0, "learning_rate": 1e-3}


@pytest.mark.long
def test_replay_on_a_real_service_brings_a_trainer_in_bfloat16_to_the_rollouts_law(
    client, moe_model_dir, tmp_path, monkeypatch, capsys
):
    found = []
    for replays in (True, False):
        if not replays:
            monkeypatch.setattr(RowRoutes, "add", lambda *_: None)
        settings = IN_PARTS | IN_BFLOAT16 | {"max_completion_length": 64, "max_steps": 2}
        trainer = trainer_of(moe_model_dir, tmp_path / str(replays), kind=WatchedTrainer, **settings)
        attach(trainer, client)
        trainer.train()
        assert logged(trainer, SHARE) == ([1, 1] if replays else [])
        found.append((law_distance(trainer), *logged(trainer, OLD.replace("max", "mean"))))
    with capsys.disabled():
        tokens = sum(map(len, trainer.differences))
        print(f"\n{tokens} tokens: KL, mean distances of two steps {found[0]} with replay, {found[1]} without")
    assert found[0][0] < found[1][0] / 10


@pytest.mark.long
def test_a_later_turn_on_a_real_service_has_the_routes_of_its_row(client, moe_model_dir, tmp_path):
    trainer = trainer_of(moe_model_dir, tmp_path)
    client.update_weights_blocking(client.status_blocking().weights_version + 1, str(moe_model_dir))
    attach(trainer, client)
    first, later = [5, 300, 7, 41], [9, 11, 13]
    _, answers, _, _ = trainer.vllm_generation.generate([first] * 4, None, 4)
    turns = [[*first, *answer, *later] for answer in answers[:2]]
    trainer.max_completion_length *= 3
    _, ends, _, _ = trainer.vllm_generation.generate(turns, None, 1)
    rows = [answers[0] + later + ends[0], answers[1] + later + ends[1], answers[2]]
    routes = trainer.vllm_generation._routes.take([first] * 3, rows)
    for row, one in zip(rows, routes, strict=True):
        wanted = chosen_experts(moe_model_dir, [*first, *row][:-1])
        np.testing.assert_array_equal(np.sort(one.array, axis=-1), wanted)
