"""Models of random weights with the first tokens of the demo model: special ones, all bytes and short words.

They encode any text. To load all 49,152 tokens takes half a second, and their logits most of a tiny model's step.
"""

import json
import shutil
from pathlib import Path


def first_tokens(tokenizer: dict, count: int) -> dict:
    """A tokenizer's file with the first `count` tokens, and the merges that make these."""
    model = tokenizer["model"]
    kept = {token: number for token, number in model["vocab"].items() if number < count}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merges = [pair for pair in pairs if {*pair, "".join(pair)} <= kept.keys()]
    return tokenizer | {"model": model | {"vocab": kept, "merges": merges}}


def save_tokenizer(source: Path, folder: Path, count: int) -> None:
    """Writes the tokenizer of the model in `source` into another model's folder, with its first `count` tokens."""
    whole = json.loads((source / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(first_tokens(whole, count)))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)


def save_tiny(source: Path, folder: Path, vocabulary: int) -> Path:
    """Makes a model of two layers with the first `vocabulary` tokens of the model in `source`. Returns `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": vocabulary, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(eos_token_id=2, tie_word_embeddings=True, **shape)).save_pretrained(folder)
    save_tokenizer(source, folder, vocabulary)
    return folder
