"""The parameters of a TRL trainer's model under the names that the service loads.

TRL's own generator gathers sharded parameters (FSDP, ZeRO-3) and merges adapters (PEFT); it is reused here. Tied
parameters are included once, as in a folder that Hugging Face saves. Parameters that transformers joins, as all experts
of a layer, have the names and shapes of such a folder again.
"""

from collections.abc import Iterator

from tailrace.app.weights.saved import conversions_of


def named_weights(trainer) -> Iterator[tuple[str, object]]:
    """Yields (name, torch tensor). Every process of a distributed trainer must iterate to the end."""
    from transformers.core_model_loading import revert_weight_conversion
    from trl.generation.vllm_generation import VLLMGeneration

    source = VLLMGeneration.__new__(VLLMGeneration)  # its constructor connects to a vLLM server
    source.model, source.accelerator, source._dist = trainer.model, trainer.accelerator, trainer._dist
    pairs, model = source._iter_named_params(), trainer.accelerator.unwrap_model(trainer.model)
    is_adapted = hasattr(model, "merge_adapter")
    model = model.get_base_model() if is_adapted else model
    if trainer.accelerator.is_main_process and any(hasattr(one, "operations") for one in conversions_of(model)):
        passes = is_adapted or trainer.accelerator.num_processes > 1  # what TRL gathers or merges, it takes back
        whole = {name: value.to("cpu", copy=True) if passes else value for name, value in pairs}
        yield from revert_weight_conversion(model, whole).items()
    else:
        yield from pairs
