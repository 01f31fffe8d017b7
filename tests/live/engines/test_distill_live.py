"""A draft model from a small random target: what is kept, what is learned, and that an interruption leaves nothing."""

import json

import pytest
import torch
from tiny_models import save_tokenizer

from tailrace.app.distill.drafter import Course, make_drafter, measured
from tailrace.app.distill.layers import cut, kept_layers
from tailrace.app.distill.texts import Text, Texts
from tailrace.deployments.vllm_exact.tokenizer_check import vocabulary_refusal

pytestmark = pytest.mark.live

VOCABULARY = 2048
COURSE = Course(layers=2, steps=60, minutes=10, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def target(model_dir, tmp_path_factory):
    """Of five layers and random weights that tell tokens apart, with the first tokens of the demo model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target") / "target"
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": VOCABULARY, "num_hidden_layers": 5, "tie_word_embeddings": True, "initializer_range": 0.15}
    LlamaForCausalLM(LlamaConfig(eos_token_id=2, **shape)).save_pretrained(folder)
    save_tokenizer(model_dir, folder, VOCABULARY)
    return folder


@pytest.fixture(scope="module")
def texts():
    chance = torch.Generator().manual_seed(1)
    made = [Text(tuple(torch.randint(3, 40, (24,), generator=chance).tolist()), 4) for _ in range(20)]
    return Texts(made[2:], made[:2])


@pytest.fixture(scope="module")
def made(target, texts, tmp_path_factory):
    """The drafter's folder and figures."""
    out = tmp_path_factory.mktemp("made") / "drafter"
    return out, make_drafter(target, texts, out, COURSE, lambda said: None)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_folder_is_whole_and_says_what_was_measured(made, target):
    out, figures = made
    assert vocabulary_refusal(target, out) is None
    assert {path.name for path in target.iterdir()} <= {path.name for path in out.iterdir()}
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (out, target))
    assert config["num_hidden_layers"] == 2 and config["tie_word_embeddings"]
    changed = {"num_hidden_layers", "transformers_version", "layer_types"}
    assert {key for key in before if config.get(key) != before[key]} <= changed
    assert measured(out) == figures["after"]["shared"] and measured(target) is None
    assert figures["steps"] == COURSE.steps and figures["parameters"] < figures["target_parameters"]


def test_it_learns_and_its_embeddings_stay_the_targets(made, target):
    out, figures = made
    assert figures["after"]["loss"] < 0.95 * figures["before"]["loss"]
    assert figures["after"]["independent"] > figures["before"]["independent"]
    ours, theirs = weights(out), weights(target)
    assert "lm_head.weight" not in ours, "shared embeddings are stored once"
    assert torch.equal(ours["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    assert not torch.equal(ours["model.layers.1.mlp.up_proj.weight"], theirs["model.layers.4.mlp.up_proj.weight"])


def test_before_it_is_taught_it_is_the_targets_own_layers(target):
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(target)
    smaller = cut(whole, 3)
    for place, old in enumerate(kept_layers(5, 3)):
        for mine, its in zip(
            smaller.model.layers[place].parameters(), whole.model.layers[old].parameters(), strict=True
        ):
            assert torch.equal(mine, its) and mine is not its
    assert smaller.get_output_embeddings().weight is smaller.get_input_embeddings().weight


def test_an_interrupted_run_leaves_nothing(target, texts, tmp_path):
    def interrupt(said):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_drafter(target, texts, tmp_path / "drafter", COURSE, interrupt)
    assert not list(tmp_path.iterdir())
