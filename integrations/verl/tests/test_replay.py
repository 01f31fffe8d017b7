"""Replay of routes in verl's FSDP actor: what it computes, and whose routes a real service gives it."""

import asyncio
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from tailrace_verl.replaying_engine import placed_routes
from tailrace_verl.replica import TailraceReplica
from test_routes import rows
from test_training_step import keys, train, write_prompts
from transformers import Qwen3MoeForCausalLM
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.llm_server import LLMServerManager

from tailrace.app.trl.route_replay import OWN

HERE = Path(__file__).parent


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_verls_fsdp_actor_computes_with_the_routes_it_is_given(mixture, packing):
    command = (sys.executable, str(HERE / "replaying.py"), str(mixture), "fsdp2", packing)
    ran = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["log_probs"] < 1e-5 and found["without"] > 0.1
    assert found["gradients"] < 1e-5 * found["greatest"], "what is computed again for it has the routes, too"
    assert found["hooks"] == 0


def test_routes_lie_where_the_models_input_ids_do():
    routes = [torch.full((length, 1, 2), length, dtype=torch.int16) for length in (2, 3)]
    routes[0][-1] = 0
    jagged = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    assert placed_routes(jagged, 2)[:, :, 0, 1].tolist() == [[2, OWN, 3, 3, 3, OWN, OWN]]
    assert placed_routes(jagged, None)[:, :, 0, 1].tolist() == [[2, OWN, OWN], [3, 3, 3]]


def chosen_experts(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """The experts of each token and layer by transformers, rising: int16[tokens, layers, chosen]; zeros without any."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = torch.zeros(len(ids), model.config.num_hidden_layers, 2, dtype=torch.int16)
    with torch.no_grad():
        logits = model(ids[None], output_router_logits=True).router_logits
    for layer, of_layer in zip((0, 2), logits, strict=True):
        found[:, layer] = of_layer.topk(2).indices.sort().values
    return found


@pytest.mark.live
@pytest.mark.parametrize("cluster", ["mixture"], indirect=True)
def test_the_services_routes_reach_verls_batch(cluster, config, mixture):
    changed = copy.deepcopy(config)
    changed.actor_rollout_ref.model.path = str(mixture)
    changed.actor_rollout_ref.rollout.enable_rollout_routing_replay = True
    TailraceReplica.server_class = cluster
    manager = LLMServerManager.create(changed)
    made = asyncio.run(AgentLoopWorker(changed, manager.get_client()).generate_sequences(rows("tailrace_agent"))).batch
    for ids, mask, routes in zip(made["input_ids"], made["attention_mask"].bool(), made["routed_experts"], strict=True):
        context = ids[mask]
        found = routes[mask].sort().values
        assert torch.equal(found[:-1], chosen_experts(mixture, context)[:-1]) and not found[-1].any()


@pytest.mark.live
@pytest.mark.parametrize("cluster", ["mixture"], indirect=True)
def test_verls_own_trainer_replays_the_services_routes(cluster, mixture, tmp_path):
    """Its FSDP computes in bfloat16, the service in float32: without replay some tokens have other experts."""
    address, differs = ray.get_runtime_context().gcs_address, {}
    replay = ["actor_rollout_ref.model.external_lib=tailrace_verl.replaying_engine"]
    for name, given in (("without", []), ("with", replay)):
        (folder := tmp_path / name).mkdir()
        write_prompts(folder)
        given += [key for key in keys(mixture, folder, address, 1, 0) if "mixed_precision" not in key]
        given += ["actor_rollout_ref.rollout.enable_rollout_routing_replay=True"]
        steps, _ = train(folder, given)
        assert all(float(row["actor/grad_norm"]) > 0 for row in steps)
        differs[name] = [float(row["training/rollout_probs_diff_max"]) for row in steps]
    assert 3 * max(differs["with"]) < min(differs["without"])
