"""A smaller model of the target's own architecture: some of its layers, and everything else unchanged.

Invariant: it has the requested number of layers, the first and the last among them; shared embeddings stay shared.
Called by drafter.py.
"""

import re
from copy import deepcopy

from tailrace.app.errors import BadInput

LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def kept_layers(layers: int, kept: int) -> tuple[int, ...]:
    """Returns the layers that stay: `kept` of `layers`, evenly spread, the first and the last among them.

    Raises BadInput unless at least two stay and at least one goes.
    """
    if not 2 <= kept < layers:
        raise BadInput(f"--layers {kept}: the model has {layers}; give 2 to {layers - 1}")
    return tuple((place * (layers - 1) + (kept - 1) // 2) // (kept - 1) for place in range(kept))


def cut(target, kept: int):
    """Returns a transformers causal LM with `kept` of the target's layers, in the target's dtype; nothing is shared
    with it.

    Raises BadInput if the architecture does not number its layers as `layers.N`.
    """
    layers = target.config.num_hidden_layers
    places = {old: new for new, old in enumerate(kept_layers(layers, kept))}
    config = deepcopy(target.config)
    for key, value in list(vars(config).items()):  # such as layer_types: one entry for each layer
        if isinstance(value, list) and len(value) == layers:
            setattr(config, key, [value[old] for old in places])
    config.num_hidden_layers = kept
    config.architectures = [type(target).__name__]
    weights = {}
    for name, tensor in target.state_dict().items():
        found = LAYER.search(name)
        if found is None:
            weights[name] = tensor
        elif int(found[2]) in places:
            weights[name[: found.start(2)] + str(places[int(found[2])]) + name[found.end(2) :]] = tensor
    smaller = type(target)(config).to(target.dtype)
    unknown = set(smaller.state_dict()) ^ set(weights)
    if unknown:
        raise BadInput(f"--model: its layers are not numbered as `layers.N`: {min(unknown)}")
    smaller.load_state_dict(weights)
    smaller.tie_weights()
    return smaller
