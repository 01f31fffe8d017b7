"""A model whose prompts take long to compute and whose KV is small: a random Llama with one KV head.

KV per token: 6,144 bytes in float32, against 46,080 of the demo model. A token costs 1.7 times as much to compute as
one of the demo model. Invariant: the folder is complete, and appears by one rename, like the demo model's. Called by
kvpool.py.
"""

import shutil
import tempfile
from pathlib import Path

from tailrace.app.model import demo_model_dir

NAME = "heavy-llama-12x1024-1kv"
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def heavy_model(demo: Path) -> Path:
    """Returns the model's folder, beside the demo model's in the user's cache. Makes it first if absent: 10 s, 900 MB
    on disk.

    `demo`: folder of the demo model. The model has its tokenizer and its size of vocabulary.
    """
    out = demo_model_dir().parent / NAME
    if out.is_dir():
        return out
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    of_demo = AutoConfig.from_pretrained(demo)
    tokens = {"bos_token_id": of_demo.bos_token_id, "eos_token_id": of_demo.eos_token_id}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=of_demo.vocab_size, **SHAPE, **tokens))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=out.parent) as folder:
        made = Path(folder) / "made"
        model.save_pretrained(made)
        for name in TOKENIZER:
            if (demo / name).is_file():
                shutil.copy(demo / name, made)
        if not out.is_dir():  # checked again: another run may have been quicker
            made.replace(out)
    return out
