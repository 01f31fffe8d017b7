"""Random adapters of LoRA for the tiny model of the live tests, in PEFT's form."""

import json
from pathlib import Path

WIDTH = 128
MODULES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (WIDTH, WIDTH // 2),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.up_proj": (WIDTH, WIDTH),
    "mlp.down_proj": (WIDTH, WIDTH),
}
"""Inputs and outputs by module."""


def make_adapter(folder: Path, seed: int, rank: int = 4, config: dict | None = None, extra: dict | None = None) -> Path:
    """Writes an adapter of all layers into a folder. `config`, `extra`: changes of its settings and of its tensors."""
    import torch
    from safetensors.torch import save_file

    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module, (inputs, outputs) in MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=chance) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=chance) / rank**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors | (extra or {}), folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none"} | (config or {})))
    return folder


def merged(model, folder: Path):
    """A model of transformers with an adapter merged into its weights."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            delta = tensors[name.replace(".lora_A.", ".lora_B.")] @ a * (settings["lora_alpha"] / settings["r"])
            module.weight.data += delta
    return model
