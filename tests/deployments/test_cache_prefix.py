"""Engines share KV of one form alone."""

import pytest

from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.launch import cache_prefix
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint


def prefix(folder, pool: PoolConfig, **settings) -> str:
    return cache_prefix(EngineConfig(model=str(folder), **settings), PoolEndpoint("a:1", "a", "", pool))


@pytest.mark.parametrize(
    "other",
    [
        {"vllm_args": {"kv_cache_dtype": "fp8"}},
        {"vllm_args": {"quantization": "fp8"}},
        {"vllm_args": {"enable_return_routed_experts": True}},
        {"dtype": "bfloat16"},
        {"pool": PoolConfig(block_check="off")},
    ],
)
def test_kv_of_another_form_has_keys_of_its_own(tmp_path, other):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    ours = prefix(tmp_path, PoolConfig(), max_running=8)
    assert ours == prefix(tmp_path, PoolConfig(), max_running=4) != prefix(tmp_path, **{"pool": PoolConfig()} | other)


def test_the_order_of_arguments_means_nothing(tmp_path):
    args = {"gpu_memory_utilization": 0.5, "kv_cache_dtype": "fp8"}
    turned = dict(reversed(args.items()))
    assert prefix(tmp_path, PoolConfig(), vllm_args=args) == prefix(tmp_path, PoolConfig(), vllm_args=turned)


def test_the_order_of_steps_changes_no_kv(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = {"device": "gpu", "pool": PoolConfig()}
    waits = prefix(tmp_path, vllm_args={"async_scheduling": False}, **settings)
    assert waits == prefix(tmp_path, **settings)
