"""The weights of a Hugging Face model under the names of a saved folder, which are those that a service compares.

Tied weights are included once, under the name that Hugging Face keeps; PEFT adapters are merged into their layers. For
your own trainers: those of TRL are read by `app.trl`.
"""

import sys
from collections.abc import Iterator

COMPILED = "_orig_mod."
"""What torch.compile adds to the names of a module's parameters."""


def bare_model(held: object) -> object:
    """Returns a model without what torch.compile and DistributedDataParallel put around it; anything else as it is."""
    if type(held).__name__ in ("OptimizedModule", "DistributedDataParallel"):
        return bare_model(held._orig_mod if hasattr(held, "_orig_mod") else held.module)
    return held


def conversions_of(held: object) -> list:
    """Returns how transformers makes a model's parameters from a folder, as `revert_weight_conversion` finds it; none
    of anything else. Those that have `operations` change shapes, the others names.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(held, transformers.PreTrainedModel):
        return []
    if (known := getattr(held, "_weight_conversions", None)) is not None:
        return known
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found = get_model_conversion_mapping(held, add_legacy=False)
    return [one for one in found if not isinstance(one, PrefixChange)]


def saved_weights(model) -> Iterator[tuple[str, object]]:
    """Yields (name, torch tensor) for `client.send_weights`. An adapter is merged until the iterator ends or is closed.

    `model`: a `transformers.PreTrainedModel`, or a `peft.PeftModel` around one. Not for sharded parameters.
    """
    model = bare_model(model)
    if hasattr(model, "merge_adapter"):
        model.merge_adapter()
        try:
            yield from _merged(model)
        finally:
            model.unmerge_adapter()
    else:
        yield from _saved(model, model.state_dict())


def _merged(model) -> Iterator[tuple[str, object]]:
    """Yields the base model's weights, with an adapter merged in."""
    base, found = model.get_base_model(), {}
    for name, tensor in base.state_dict().items():
        parts = name.split(".")
        if any(part.startswith("lora_") or part == "original_module" for part in parts):
            continue  # merged already, or replaced by the trained copy
        if "modules_to_save" in parts:
            place = parts.index("modules_to_save")
            del parts[place : place + 2]  # with the adapter's name
        found[".".join(part for part in parts if part != "base_layer")] = tensor
    yield from _saved(base, found)


def _saved(model, state: dict) -> Iterator[tuple[str, object]]:
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = {name.replace(COMPILED, ""): tensor for name, tensor in state.items()}
    yield from revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model)).items()
