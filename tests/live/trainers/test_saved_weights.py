"""Names and values of `saved_weights` are those of a folder that Hugging Face saves."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tailrace import saved_weights


def assert_as_saved(sent: dict, model, folder) -> None:
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    assert sent.keys() == saved.keys()
    assert all(sent[name].equal(saved[name]) for name in saved)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_have_the_names_of_a_saved_folder(tmp_path, tied):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, tie_word_embeddings=tied, **shape)
    model = LlamaForCausalLM(config)
    sent = dict(saved_weights(model))
    assert ("lm_head.weight" in sent) == (not tied)
    assert_as_saved(sent, model, tmp_path)


def test_a_compiled_model_s_names_are_its_own(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, hidden_size=32, num_attention_heads=2))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    model.model.layers[0] = torch.compile(model.model.layers[0])
    sent = dict(saved_weights(torch.compile(model)))
    assert sent.keys() == saved.keys() and all(sent[name].equal(saved[name]) for name in saved)


def test_an_adapter_comes_merged_and_is_left_as_it_was(small_model, tmp_path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    sent = {name: value.clone() for name, value in saved_weights(adapted)}
    assert all(value.allclose(before[name], atol=1e-6) for name, value in adapted.state_dict().items())
    base = load_file(small_model / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj.weight"
    assert sent.keys() == base.keys() and not sent[query].allclose(base[query])
    assert_as_saved(sent, adapted.merge_and_unload(), tmp_path)
