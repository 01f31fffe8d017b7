"""A model small enough to train in a second, with the first tokens of the demo model."""

from pathlib import Path

import pytest
from tiny_models import save_tokenizer

VOCABULARY = 2048


@pytest.fixture(scope="session")
def small_model(model_dir, tmp_path_factory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small") / "model"
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "max_position_embeddings": 512}
    LlamaForCausalLM(LlamaConfig(eos_token_id=2, tie_word_embeddings=True, **shape)).save_pretrained(folder)
    save_tokenizer(model_dir, folder, VOCABULARY)
    return folder


@pytest.fixture(scope="session")
def moe_model_dir(model_dir, tmp_path_factory) -> Path:
    """A mixture of experts with random weights and the demo model's tokenizer."""
    from moe_model import make_moe_model

    folder = tmp_path_factory.mktemp("experts") / "model"
    make_moe_model(folder, model_dir)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _pinned(a_core_each):
    """Two processes of this folder's tests run side by side."""


@pytest.fixture
def on_a_cpu(monkeypatch):
    """TRL's asynchronous trainer takes a GPU for granted: it asks torch.cuda for a name, and loads GPU kernels."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "examples"))
    import trl_on_a_cpu

    trl_on_a_cpu.patch(monkeypatch.setattr)
