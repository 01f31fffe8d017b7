"""Models of random weights for vLLM's own drafters: one with a layer for multi-token prediction, an EAGLE head."""

import json
from pathlib import Path

from tiny_models import save_tokenizer

SHAPE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


def save_mtp(source: Path, folder: Path, vocabulary: int) -> Path:
    """Makes a MiMo of two layers and one for multi-token prediction, with the first `vocabulary` tokens of the model
    in `source`. Returns `folder`.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": vocabulary, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    Qwen2ForCausalLM(Qwen2Config(eos_token_id=2, tie_word_embeddings=False, **shape)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    wide = SHAPE["hidden_size"]
    layer = {name[len("model.layers.0.") :]: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    layer |= {f"{name}_layernorm.weight": torch.ones(wide) for name in ("token", "hidden", "final")}
    layer["input_proj.weight"] = torch.cat([torch.eye(wide), torch.eye(wide)], dim=1) / 2
    tensors |= {f"model.mtp_layers.0.{name}": tensor.clone() for name, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(source, folder, vocabulary)
    return folder


def save_eagle(folder: Path, vocabulary: int) -> Path:
    """Makes an EAGLE head for a Llama of `save_tiny` with this vocabulary. Returns `folder`."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = SHAPE | {"vocab_size": vocabulary, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(eos_token_id=2, tie_word_embeddings=True, **shape)).save_pretrained(folder)
    layer = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if ".layers." in name and "input_layernorm" not in name  # the head has none
    }
    wide = SHAPE["hidden_size"]
    layer["fc.weight"] = torch.cat([torch.eye(wide), torch.eye(wide)], dim=1) / 2
    save_file(layer, folder / "model.safetensors", {"format": "pt"})
    return folder
