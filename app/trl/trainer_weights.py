"""The parameters of a TRL trainer's model under the names that the service loads.

TRL's own generator gathers sharded parameters (FSDP, ZeRO-3) and merges adapters (PEFT); it is reused here. Tied
parameters are included once, as in a folder that Hugging Face saves.
"""

from collections.abc import Iterator


def named_weights(trainer) -> Iterator[tuple[str, object]]:
    """Yields (name, torch tensor). Every process of a distributed trainer must iterate to the end."""
    from trl.generation.vllm_generation import VLLMGeneration

    source = VLLMGeneration.__new__(VLLMGeneration)  # its constructor connects to a vLLM server
    source.model, source.accelerator, source._dist = trainer.model, trainer.accelerator, trainer._dist
    yield from source._iter_named_params()
