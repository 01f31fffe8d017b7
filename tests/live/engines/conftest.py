"""A model with few tokens: under Triton's interpreter a row of the demo model's vocabulary takes half a second."""

import json
import shutil
from pathlib import Path

import pytest

VOCABULARY = 2048


def first_tokens(tokenizer: dict) -> dict:
    """The demo model's tokenizer with its first tokens alone, which are the special ones, all bytes and short words."""
    model = tokenizer["model"]
    kept = {token: number for token, number in model["vocab"].items() if number < VOCABULARY}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merges = [pair for pair in pairs if {*pair, "".join(pair)} <= kept.keys()]
    return tokenizer | {"model": model | {"vocab": kept, "merges": merges}}


@pytest.fixture(scope="session")
def narrow_model(model_dir, tmp_path_factory) -> Path:
    """Folder of a model of two layers with random weights, for VOCABULARY tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("narrow") / "model"
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(eos_token_id=2, tie_word_embeddings=True, **shape)).save_pretrained(folder)
    whole = json.loads((model_dir / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(first_tokens(whole)))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_dir / name, folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _pinned(a_core_each):
    """Two processes of this folder's tests run side by side."""
