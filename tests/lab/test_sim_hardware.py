"""Replica models from published figures: roofs that no step breaks, sizes that add up, profiles read back."""

from itertools import pairwise

import pytest

from tailrace.app.step_profile import fit
from tailrace.lab.simulator.hardware import GPUS, MODELS, from_profile, replica_model

PLACED = [
    ("H800", "Moonlight-16B-A3B", 1), ("H800", "Qwen2-VL-72B", 8), ("H800", "Kimi-K2", 32), ("H800", "Qwen2.5-32B", 4),
    ("H20", "Qwen2.5-14B", 1), ("H100", "Qwen2.5-7B", 1), ("H100", "Qwen3-8B", 1), ("A100", "Qwen2.5-7B", 2),
    ("H100", "DeepSeek-R1-Distill-Qwen-7B", 1), ("H200", "Qwen2.5-32B", 1),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "model", "gpus"), PLACED)
def test_no_step_breaks_the_roofs(gpu, model, gpus):
    """Neither memory's, for the weights that one token needs and the KV read, nor the one of operations."""
    g, m, step = GPUS[gpu], MODELS[model], replica_model(gpu, model, gpus).step
    for tokens, context in ((1, 0), (1, 30_000), (64, 500_000), (2_000, 500_000)):
        read_bytes = m.active_parameters * m.parameter_bytes + context * m.kv_bytes
        operations = 2 * m.active_parameters * tokens
        assert step.seconds(tokens, context) > read_bytes / (g.memory_bytes_s * gpus)
        assert step.seconds(tokens, context) > operations / ((g.fp8_ops_s, g.bf16_ops_s)[m.parameter_bytes - 1] * gpus)


@pytest.mark.parametrize(("gpu", "model", "gpus"), PLACED)
def test_weights_and_kv_fit_in_memory_and_fill_most_of_it(gpu, model, gpus):
    g, m, replica = GPUS[gpu], MODELS[model], replica_model(gpu, model, gpus)
    held = m.parameters * m.parameter_bytes + replica.kv_capacity_tokens * m.kv_bytes
    assert 0.6 * g.memory_bytes * gpus < held < 0.92 * g.memory_bytes * gpus
    assert replica.gpus == gpus and replica.fetch_tokens_s > replica.prefill_tokens_s


@pytest.mark.parametrize(("gpu", "model", "gpus"), PLACED)
def test_more_tokens_never_cost_less_and_each_one_costs_less_than_a_step_alone(gpu, model, gpus):
    step = replica_model(gpu, model, gpus).step
    took = [step.seconds(tokens, 0) for tokens in (1, 2, 4, 16, 64, 256, 1_024)]
    assert all(a < b for a, b in pairwise(took)) and took[-1] < 1_024 * took[0]


@pytest.mark.parametrize(("model", "whole"), [("Moonlight-16B-A3B", 1408 * 26), ("Kimi-K2", 2048 * 60)])
def test_experts_are_what_the_architecture_says(model, whole):
    """Three matrices of hidden x expert width in each layer; and a lone token reads no more than its active weights."""
    m = MODELS[model]
    assert m.expert_parameters == pytest.approx(3 * m.hidden * whole * m.experts, rel=0.02)
    step = replica_model("H800", model, 32 if model == "Kimi-K2" else 1).step
    assert step.seconds(1, 0) - step.seconds(0, 0) < 0.2 * step.experts_s
    assert step.seconds(1_000, 0) - step.seconds(0, 0) - 1_000 * step.token_s == pytest.approx(step.experts_s)


def test_more_gpus_are_faster_and_hold_more():
    few, many = (replica_model("H800", "Qwen2.5-32B", gpus) for gpus in (2, 4))
    assert many.step.seconds(64, 10**5) < few.step.seconds(64, 10**5)
    assert many.kv_capacity_tokens > 2 * few.kv_capacity_tokens


@pytest.mark.parametrize(
    ("gpu", "model", "gpus", "says"),
    [("H800", "Kimi-K2", 8, "does not fit"), ("H8O0", "Qwen3-8B", 1, "H800"), ("H800", "Qwen3-8", 1, "Qwen3-8B")],
)
def test_what_cannot_be_is_refused_in_a_line(gpu, model, gpus, says):
    with pytest.raises(ValueError, match=says) as error:
        replica_model(gpu, model, gpus)
    assert "\n" not in str(error.value)


def test_a_profile_is_read_back():
    """Steps of a known engine, as `tailrace profile --json` writes them, give that engine."""
    steps = [
        {"chunks": c, "draft_tokens": d, "context_tokens": n, "step_ms": 20 + 3 * c * (1 + d) + 0.002 * c * n}
        for c in (1, 2, 4) for d in (0, 3, 7) for n in (32, 512)
    ]  # fmt: skip
    profile = {"fit": fit(steps), "prefill_ms": {"32": 40.0, "512": 280.0, "128": 88.0}}
    replica = from_profile(profile, 10_000, 8, 5e4, 0.03)
    assert replica.step.seconds(8, 1_000) == pytest.approx(0.020 + 0.024 + 0.002, rel=1e-3)
    assert replica.prefill_tokens_s == pytest.approx(2_000)
    assert (replica.kv_capacity_tokens, replica.max_running, replica.fetch_tokens_s) == (10_000, 8, 5e4)
