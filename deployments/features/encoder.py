"""The encoders of a multimodal model in a vLLM worker: each item is encoded by itself, and tried before it is accepted.

Invariants: an item's embeddings are a function of the item and the weights, whatever else is encoded in the step. A
request whose items do not fit the model is refused before it is in a step, where its error would end all chunks.
`runner`: vLLM's model runner. Called by the worker.
"""

from collections.abc import Callable
from dataclasses import replace

from tailrace.deployments.features.prompt_features import PromptFeatures


def encode_alone(runner) -> None:
    """Lets the runner encode one item at a time; vLLM 0.32 encodes all items of a step in one batch.

    Remove when vLLM has a switch for it.
    """
    together: Callable = runner._execute_mm_encoder

    def one_by_one(scheduler_output) -> list:
        found = []
        for request_id, numbers in scheduler_output.scheduled_encoder_inputs.items():
            for number in numbers:
                found += together(replace(scheduler_output, scheduled_encoder_inputs={request_id: [number]}))
        return found

    runner._execute_mm_encoder = one_by_one


def features_refusal(runner, features: PromptFeatures, token_ids: list[int], new: list[int]) -> str | None:
    """Returns in a few words why the model cannot take these features of a prompt, or None. `new`: numbers of the items
    that it has not taken yet; each is encoded.
    """
    import torch

    from tailrace.deployments.features.vllm_inputs import specs

    try:
        items = specs(features)
        with torch.inference_mode():
            for number in new:
                if (reason := _item_refusal(runner, items[number])) is not None:
                    return f"item {number}, of {items[number].modality!r}: {reason}"
        if runner.uses_mrope:
            positions, _ = runner.get_model().get_mrope_input_positions(token_ids, items)
            if positions.shape[-1] != len(token_ids):
                return f"they give {positions.shape[-1]} positions to {len(token_ids)} tokens"
    except Exception as error:  # noqa: BLE001 - the model's own code: any error is the fault of the data
        return f"the model does not take them: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
    return None


def _item_refusal(runner, item) -> str | None:
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    ((_, _, arguments),) = group_and_batch_mm_kwargs([(item.modality, item.data)], device=runner.device)
    embeddings = runner.get_model().embed_multimodal(**arguments)
    if embeddings is None or len(embeddings) != 1:
        return "the model has no encoder for it"
    if len(embeddings[0]) != item.mm_position.length:
        return f"it has {len(embeddings[0])} embeddings, its placeholder {item.mm_position.length} tokens"
    return None if embeddings[0].isfinite().all() else "an embedding is not a number"
