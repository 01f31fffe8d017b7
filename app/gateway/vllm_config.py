"""The part of vLLM's configuration that clients read at `/server_info`. Source of names: vLLM 0.32's `VllmConfig`."""

from tailrace.app.gateway.service import ServedModel
from tailrace.deployments.messages.status import ServiceSnapshot


def vllm_config(model: ServedModel, status: ServiceSnapshot) -> dict:
    """Returns the part. `dtype`, `weight_transfer_config` and `lora_config` are those of the first replica; null while
    there is none.
    """
    engine = next(iter(status.replicas), None)
    transfer = engine.weight_transfer if engine else ""
    return {
        "model_config": {
            "model": model.root,
            "max_model_len": model.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "dtype": f"torch.{engine.dtype}" if engine else None,
        },
        "parallel_config": {
            "data_parallel_size": len(status.replicas),
            "tensor_parallel_size": engine.ranks if engine else 1,
        },
        "weight_transfer_config": {"backend": transfer} if transfer else None,
        "lora_config": {"max_loras": engine.max_loras} if engine and engine.max_loras else None,
    }
