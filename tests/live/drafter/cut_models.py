"""A target and a draft model of the demo model's layers, and their configurations.

The target is the demo model with fewer layers, whose later ones do little, so that the first of them alone
are a draft model, faster than it and mostly right.
"""

import json
import shutil
from pathlib import Path

from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig

WINDOW = 4
PATIENT_S = 120.0
"""Samples that take turns wait for their drafts: that there are some depends on no machine's pace."""
TARGET_LAYERS, DRAFT_LAYERS = 16, 2
LITTLE = 0.05
"""What layers behind the drafter's add, beside what they would."""


def cut(source: Path, folder: Path, layers: int) -> Path:
    """A model of the first `layers` layers; those behind DRAFT_LAYERS add little."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt") and path.name != "config.json":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": layers}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if layer < layers:
            damped = layer >= DRAFT_LAYERS and name.endswith(("o_proj.weight", "down_proj.weight"))
            tensors[name] = tensor * LITTLE if damped else tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine_of(target: Path) -> EngineConfig:
    draft = DraftConfig(method="model", draft_tokens=8)
    return EngineConfig(model=str(target), max_model_len=256, max_running=8, kv_cache_gib=0.25, draft=draft)


def drafter_of(drafter: Path) -> DrafterConfig:
    return DrafterConfig(model=str(drafter), window=WINDOW, mode="coupled", patience_s=PATIENT_S, kv_cache_gib=0.25)
