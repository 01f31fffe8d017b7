"""Routed experts beside the KV, over stand-ins for vLLM's capturer: what is read is what the routers chose."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stand_ins import loaded_with

import tailrace.deployments.vllm_exact.engine_config  # noqa: F401 - before the module's own import, which is undone

LAYERS, CHOSEN, BLOCK_TOKENS = 2, 3, 4


class Capturer:
    """vLLM's RoutedExpertsCapturer of a model with `config.experts` experts in each of two layers."""

    def __init__(self, most_tokens: int, config):
        self.shape_per_token = LAYERS, CHOSEN
        self.output_dtype_name = "uint8" if config.experts <= 256 else "uint16"
        self.output_dtype = getattr(torch, self.output_dtype_name)
        self.device_buffer = torch.zeros((most_tokens, LAYERS, CHOSEN), dtype=torch.int32)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        self.device_buffer[: len(topk_ids), layer_id] = topk_ids


class Runner(torch.nn.Module):
    """vLLM's MoERunner."""

    def __init__(self, layer_id: int):
        super().__init__()
        self.layer_id = layer_id


class Spec:
    """vLLM's FullAttentionSpec."""

    block_size = BLOCK_TOKENS


FUSED = "vllm.model_executor.layers.fused_moe"
forward = SimpleNamespace(slot_mapping=None)
STAND_INS = {
    "vllm.forward_context": {"get_forward_context": lambda: forward},
    f"{FUSED}.layer": {"MoERunner": Runner},
    f"{FUSED}.routed_experts_capturer": {
        "RoutedExpertsCapturer": Capturer,
        "bind_routed_experts_capturer": lambda model, capturer: None,
    },
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec": Spec},
}

expert_routes = loaded_with("tailrace.deployments.vllm_exact.expert_routes", STAND_INS)


@pytest.mark.parametrize(("experts", "kind"), [(128, np.uint8), (256, np.uint8), (257, np.uint16), (512, np.uint16)])
def test_routes_are_read_as_they_were_chosen_by_models_of_few_and_of_many_experts(experts, kind):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=8), experts=experts)
    group = SimpleNamespace(kv_cache_spec=Spec(), layer_names=["attention"])
    model = torch.nn.ModuleList(Runner(layer) for layer in range(LAYERS))
    routes = expert_routes.ExpertRoutes(config, model, SimpleNamespace(kv_cache_groups=[group], num_blocks=5))
    chosen = torch.randint(0, experts, (7, LAYERS, CHOSEN), generator=torch.Generator().manual_seed(0))
    chosen[-2] = experts - 1
    slots = [3 * BLOCK_TOKENS + place for place in range(4)] + [1 * BLOCK_TOKENS, 1 * BLOCK_TOKENS + 1, -1]
    forward.slot_mapping = {"attention": torch.tensor(slots)}
    for layer in range(LAYERS):
        routes.capture(layer, chosen[:, layer])
    found = routes.read([3, 1], 1, 6)
    assert found.dtype == kind and (found == chosen[1:6].numpy()).all()
    assert routes.read([3, 1], 6, 6).shape == (0, LAYERS, CHOSEN)
