"""A tiny mixture of experts (Qwen3-MoE, random weights, the demo model's tokenizer), and its routes by transformers."""

import shutil
from pathlib import Path

import numpy as np

TOKENIZER = "tokenizer.json", "tokenizer_config.json"
LAYERS, EXPERTS, CHOSEN = 3, 8, 2


def make_moe_model(folder: Path, tokenizer: Path) -> None:
    """A Hugging Face folder; takes a second, and loads transformers. The middle layer has no experts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"head_dim": 64, "vocab_size": 49152, "num_hidden_layers": LAYERS, "max_position_embeddings": 4096}
    shape |= {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 64}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(eos_token_id=2, mlp_only_layers=[1], **shape))
    for name, weight in model.named_parameters():
        if ".mlp.experts." in name:  # else the answer hardly depends on the choice
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, folder)


def chosen_experts(folder: Path, token_ids: list[int]) -> np.ndarray:
    """The experts of each token and layer by transformers, rising: int[tokens, LAYERS, CHOSEN]; zeros without any."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = np.zeros((len(token_ids), LAYERS, CHOSEN), int)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    for layer, of_layer in zip((0, 2), logits, strict=True):
        found[:, layer] = of_layer.topk(CHOSEN).indices.sort().values.numpy()
    return found
