"""`engine.exactness`: its default by device, what each level sets in vLLM, and the settings that a level refuses."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from tailrace.deployments.vllm_exact.attention import INVARIANT
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.launch import engine_arguments, process_settings

KERNELS = "VLLM_BATCH_INVARIANT"
FA2 = {"backend": "FLASH_ATTN", "flash_attn_version": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
OWN = SimpleNamespace(backend=None, flash_attn_version=2)


def config(**given) -> EngineConfig:
    return EngineConfig.model_validate({"model": "m", "device": "gpu"} | given)


def test_a_cpu_has_bits_and_v1_and_a_gpu_law_and_v2():
    cpu, gpu = config(device="cpu"), config()
    assert (cpu.exactness, cpu.model_runner, gpu.exactness, gpu.model_runner) == ("bits", "v1", "law", "v2")
    assert config(vllm_args={"speculative_config": SUFFIX}).model_runner == "v1"  # V2 has no such drafter
    assert config(device="cpu", dtype="bfloat16").exactness == config(device="cpu", dtype="float16").exactness == "law"
    with pytest.raises(ValidationError, match=r"in float16 a CPU's tokens depend on the batch; write law, or dtype"):
        config(device="cpu", exactness="bits", dtype="float16")


def test_bits_in_bfloat16_on_a_cpu_computes_in_windows_and_takes_no_adapters():
    windowed, split = config(device="cpu", exactness="bits", dtype="bfloat16"), "VLLM_CPU_ATTN_SPLIT_KV"
    assert engine_arguments(windowed)["worker_cls"].endswith(".WindowedCPUWorker")
    assert process_settings(windowed, None)[split] == "0"
    for other in (config(device="cpu"), config(device="cpu", dtype="bfloat16"), config(exactness="bits")):
        assert not other.has_windows and split not in process_settings(other, None)
        assert "Windowed" not in engine_arguments(other)["worker_cls"]
    with pytest.raises(ValidationError, match=r"vllm_args.enable_lora: bits in bfloat16 .*; write law, or dtype"):
        config(device="cpu", exactness="bits", dtype="bfloat16", vllm_args={"enable_lora": True})


def test_law_leaves_kernels_and_attention_to_vllm():
    assert process_settings(config(), None)[KERNELS] == "0"
    assert not {"attention_backend", "attention_config"} & engine_arguments(config()).keys()
    given = {"attention_backend": "FLASH_ATTN"}
    assert engine_arguments(config(vllm_args=given))["attention_backend"] == "FLASH_ATTN"


def test_bits_takes_invariant_kernels_and_names_an_invariant_attention():
    bits = config(exactness="bits")
    assert process_settings(bits, None)[KERNELS] == "1"
    assert engine_arguments(bits)["attention_config"] == INVARIANT
    cpu = config(device="cpu")
    assert KERNELS not in process_settings(cpu, None) and "attention_config" not in engine_arguments(cpu)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"attention_config": {"flex_attn_block_m": 32}}, INVARIANT | {"flex_attn_block_m": 32}),
        ({"attention_backend": "auto"}, INVARIANT),
        ({"attention_config": OWN}, INVARIANT | {"flash_attn_version": 2}),
        ({"attention_config": FA2}, FA2),
        ({"attention_backend": "FLASH_ATTN", "attention_config": {"flash_attn_version": 2}}, {"flash_attn_version": 2}),
        ({"attention_backend": "FLEX_ATTENTION"}, None),
        ({"attention_backend": SimpleNamespace(name="TRITON_ATTN")}, None),
    ],
)  # fmt: skip
def test_a_backend_that_the_user_names_stays(given, found):
    assert engine_arguments(config(exactness="bits", vllm_args=given)).get("attention_config") == found


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"attention_backend": "FLASH_ATTN"}, "attention_backend"),
        ({"attention_backend": "flash_attn"}, "attention_backend"),
        ({"attention_config": {"backend": "FLASH_ATTN"}}, "attention_config"),
        ({"attention_config": {"flash_attn_version": 3}}, "attention_config"),
        ({"attention_config": {"backend_per_kind": {"full_attention": "FLASH_ATTN"}}}, "attention_config"),
        ({"attention_backend": "FLASH_ATTN", "attention_config": {"flash_attn_version": 4}}, "attention_backend"),
    ],
)
def test_bits_refuses_flash_attention_3_in_one_line(given, key):
    with pytest.raises(
        ValidationError, match=rf"vllm_args.{key}: FlashAttention [34] .*flash_attn_version: 2"
    ) as error:
        config(exactness="bits", vllm_args=given)
    assert len(error.value.errors()) == 1
    assert config(vllm_args=given).exactness == "law"
    assert config(device="cpu", vllm_args=given).exactness == "bits"  # a CPU has another backend


def test_redraws_need_bits():
    assert config(exactness="bits", redraw_close_calls=True).redraw_close_calls
    with pytest.raises(ValidationError, match=r"redraw_close_calls: at exactness law .* write exactness: bits"):
        config(redraw_close_calls=True)
