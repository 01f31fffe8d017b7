"""Experts read back from a layer that joins and repacks them."""

from types import SimpleNamespace

import pytest
import torch

from tailrace.deployments.staging import held_experts
from tailrace.deployments.staging.held import HeldWeights

EXPERTS, WIDTH, HIDDEN, PADDED = 3, 40, 24, 64
MATRICES = ("gate_proj", "w13_", "w1"), ("down_proj", "w2_", "w2"), ("up_proj", "w13_", "w3")


def repacked(weights: torch.Tensor, isa: str) -> torch.Tensor:
    """Another order of each matrix: its transposed one from the end on."""
    assert isa == "odd"
    return weights.transpose(1, 2).flip(1).reshape(weights.shape)


class Experts(torch.nn.Module):
    """A layer as vLLM's, whose kernel has padded the experts' width and repacked their matrices."""

    def __init__(self, saved: dict[str, torch.Tensor], kernel: object):
        super().__init__()
        self.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel))
        w13 = torch.zeros(EXPERTS, 2 * PADDED, HIDDEN, dtype=saved["mlp.experts.0.up_proj.weight"].dtype)
        w2, self.w13_bias = w13.new_zeros(EXPERTS, HIDDEN, PADDED), torch.nn.Parameter(torch.zeros(EXPERTS, 2 * PADDED))
        for number in range(EXPERTS):
            w13[number, :WIDTH] = saved[f"mlp.experts.{number}.gate_proj.weight"]
            w13[number, PADDED : PADDED + WIDTH] = saved[f"mlp.experts.{number}.up_proj.weight"]
            w2[number, :, :WIDTH] = saved[f"mlp.experts.{number}.down_proj.weight"]
            self.w13_bias.data[number, PADDED : PADDED + WIDTH] = saved[f"mlp.experts.{number}.up_proj.bias"]
        packs = hasattr(kernel, "isa")
        self.w13_weight = torch.nn.Parameter(repacked(w13, kernel.isa) if packs else w13)
        self.w2_weight = torch.nn.Parameter(repacked(w2, kernel.isa) if packs else w2)

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        return [
            (f"experts.{parameter}", f"experts.{number}.{name}.", number, shard)
            for number in range(EXPERTS)
            for name, parameter, shard in MATRICES
        ]


class TritonExperts:
    """The name of a kernel that takes the weights as they are."""


def model_of(saved: dict[str, torch.Tensor], kernel: object) -> torch.nn.Module:
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.mlp.experts = torch.nn.Module()
    model.mlp.experts.routed_experts = Experts(saved, kernel)
    return model


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    found = {f"mlp.experts.{i}.{n}.weight": torch.randn(s).to(dtype) for i in range(EXPERTS) for n, s in shapes.items()}
    return found | {f"mlp.experts.{i}.up_proj.bias": torch.randn(WIDTH) for i in range(EXPERTS)}


@pytest.fixture(autouse=True)
def other_order(monkeypatch):
    monkeypatch.setattr(held_experts, "repacked", repacked)
    held_experts.places.cache_clear()
    yield
    held_experts.places.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [SimpleNamespace(isa="odd", _use_zentorch=False), TritonExperts()])
def test_each_expert_is_read_back_under_its_saved_name(dtype, kernel):
    saved = weights(dtype)
    model = model_of(saved, kernel)
    held = HeldWeights(model, {name: tuple(value.shape) for name, value in saved.items()})
    assert all(value.equal(saved[name]) for name, value in held) and held.unlike(iter(saved.items())) == []
    with torch.no_grad():
        model.mlp.experts.routed_experts.w2_weight[1] *= -1
        model.mlp.experts.routed_experts.w13_bias[2, PADDED] += 1
    assert held.unlike(iter(saved.items())) == ["mlp.experts.1.down_proj.weight", "mlp.experts.2.up_proj.bias"]


@pytest.mark.parametrize(
    ("kernel", "name"),
    [(SimpleNamespace(isa="odd", _use_zentorch=True), "SimpleNamespace"), (object(), "object")],
)
def test_a_kernel_that_is_not_known_is_an_error(kernel, name):
    saved = weights(torch.float32)
    model = model_of(saved, TritonExperts())
    layer = model.mlp.experts.routed_experts
    layer.quant_method.moe_kernel.fused_experts = kernel
    held = HeldWeights(model, {name: tuple(value.shape) for name, value in saved.items()})
    with pytest.raises(ValueError, match=f"^the experts of {name} cannot be read back$"):
        dict(held)
    layer.quant_method = object()
    with pytest.raises(ValueError, match=r"^the experts of object cannot be read back$"):
        dict(held)
