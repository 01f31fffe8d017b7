"""Tensors of a trainer's model that its folder has not: the output head, if it is tied to the embeddings.

The service compares names with those of the folder, and some models save their tied head (Qwen3-0.6B) where others do
not. Called by the replica.
"""

from pathlib import Path

from safetensors import safe_open

HEAD = "lm_head.weight"


def unsaved_tensors(model: str) -> tuple[str, ...]:
    """`model`: verl's `model.path`. Returns nothing if it is no folder on this node: then all tensors are sent."""
    names: set[str] = set()
    for path in Path(model).glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            names.update(file.keys())
    return (HEAD,) if names and HEAD not in names else ()
