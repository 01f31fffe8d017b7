"""An adapter's folder in PEFT's format: the digest of its content, and the tensors that do not fit a model.

Invariant: the digest covers every byte that decides a token. Only safetensors are read: other formats can run code.
Called by the engine, by its worker, and by tests.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tailrace.deployments.messages.errors import AdapterRefused
from tailrace.deployments.staging.safetensors_header import read_header

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

PIECE_BYTES = 16 << 20
DIGEST_BYTES = 8

ENDS = (".lora_A.weight", ".lora_B.weight")
PREFIX = "base_model.model."
"""Prefix of a tensor's name in PEFT; the module's name and one of the suffixes follow."""


def adapter_digest(folder: str) -> str:
    """Returns 16 hex digits that name the content of both files. Raises AdapterRefused, one line, if one is absent."""
    from blake3 import blake3  # absent from the light installation

    if not Path(folder).is_absolute():
        raise AdapterRefused(f"adapter folder {folder}: give an absolute path")
    state = blake3()
    try:
        for name in (CONFIG, TENSORS):
            with (Path(folder) / name).open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    state.update(piece)
                state.update(f"\0{file.tell()}\0".encode())
    except OSError as error:
        raise AdapterRefused(f"adapter folder {folder}: {error.filename}: {error.strerror}") from error
    return state.hexdigest(length=DIGEST_BYTES)


def misfit(folder: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns in one line why the tensors do not fit a model with weights of these shapes, or None.

    Modules that the model saves under other names are not checked here.
    """
    try:
        json.loads((Path(folder) / CONFIG).read_text())["r"]
        header, _ = read_header(Path(folder) / TENSORS)
        return _unlike(folder, header, shapes)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        return f"adapter folder {folder}: not in PEFT's form: {error!r}"


def _unlike(folder: str, header: Mapping[str, dict], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns `misfit` of a header. Raises LookupError or TypeError for entries of another form."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        module, end = name.removeprefix(PREFIX), next((end for end in ENDS if name.endswith(end)), "")
        if not end:
            return f"adapter folder {folder}: {name} is no tensor of LoRA; merge it, and send all weights"
        weight = shapes.get(f"{module.removesuffix(end)}.weight")
        if weight is None:
            continue
        wanted = weight[1] if end == ENDS[0] else weight[0]
        found = entry["shape"][1] if end == ENDS[0] else entry["shape"][0]
        if found != wanted:
            return f"adapter folder {folder}: {name} is {entry['shape']}, for a weight of {list(weight)}"
    return None
