"""Model folders with random weights and a tokenizer of words, made on the machine that needs them, without a download.

Random weights are the harder test of exactness, since no token is so likely that it hides noise. Logits have a standard
deviation of about 3, like those of trained models.
"""

import json
from math import prod
from pathlib import Path
from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of a model. `_write_settings` writes them under the names that Hugging Face's configurations have."""

    kind: str  # a key of CLASSES
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int
    tied: bool = True
    experts: int = 0  # number of experts in each layer; `inner` is then the size of each expert
    chosen: int = 0  # number of experts that a token uses


SHAPES = {
    "135M": Shape("llama", 576, 30, 9, 3, 64, 1536, 49_152),
    "1.7B": Shape("qwen3", 2048, 28, 16, 8, 128, 6144, 151_936),
    "8B": Shape("llama", 4096, 32, 32, 8, 128, 14_336, 128_256, tied=False),
    "short": Shape("qwen3", 2048, 4, 16, 8, 128, 6144, 32_768),
    "experts": Shape("qwen3_moe", 2048, 4, 32, 4, 128, 768, 32_768, tied=False, experts=128, chosen=8),
    "tiny": Shape("llama", 128, 2, 2, 1, 64, 128, 512),
    "tiny experts": Shape("qwen3_moe", 128, 2, 2, 1, 64, 64, 512, tied=False, experts=4, chosen=2),
}
"""Shapes of SmolLM2-135M, Qwen3-1.7B and Llama-3.1-8B. `short` has four layers of Qwen3-1.7B and fewer words, `experts`
four layers of Qwen3-30B-A3B and fewer words. Two shapes are for dry runs and small runs.
"""

TINY = {"experts": "tiny experts"}
"""Names of the shapes that replace others in a small run; `tiny` replaces those that are not listed."""

DUMMY = ("8B",)
"""Names of shapes whose weights vLLM's dummy loader makes: a folder of such weights would take minutes and
gigabytes.
"""

CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
WEIGHTS = "model.safetensors"
LENGTH = 16_384
DEVIATION = 3.0


def tensors_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the weights, as Hugging Face saves them."""
    width, kv, found = shape.heads * shape.head, shape.kv_heads * shape.head, {}
    found["model.embed_tokens.weight"] = (shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        parts = {
            "q": (width, shape.hidden),
            "k": (kv, shape.hidden),
            "v": (kv, shape.hidden),
            "o": (shape.hidden, width),
        }
        found |= {f"{at}self_attn.{name}_proj.weight": size for name, size in parts.items()}
        if shape.kind != "llama":
            found |= {f"{at}self_attn.{name}_norm.weight": (shape.head,) for name in ("q", "k")}
        if shape.experts:
            found[f"{at}mlp.gate.weight"] = (shape.experts, shape.hidden)
        for each in [f"experts.{number}." for number in range(shape.experts)] or [""]:
            found |= {f"{at}mlp.{each}{name}_proj.weight": (shape.inner, shape.hidden) for name in ("gate", "up")}
            found[f"{at}mlp.{each}down_proj.weight"] = (shape.hidden, shape.inner)
        found |= {f"{at}{name}_layernorm.weight": (shape.hidden,) for name in ("input", "post_attention")}
    found["model.norm.weight"] = (shape.hidden,)
    return found if shape.tied else found | {"lm_head.weight": (shape.vocabulary, shape.hidden)}


def shape_for(name: str, small: bool) -> str:
    """Returns the name of the shape, or in a small run the name of the shape that replaces it."""
    return TINY.get(name, "tiny") if small else name


def model_of(name: str, root: Path, seed: int = 0, device: str = "cuda") -> Path:
    """Returns the model folder of a shape and a seed, and makes the folder if it does not exist. The weights appear by
    one rename, so that a step which is killed meanwhile leaves none that are cut off.
    """
    folder = root / f"{name}-{seed}"
    if not (folder / WEIGHTS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_settings(folder, SHAPES[name])
        part = folder / f".{WEIGHTS}.part"
        if name in DUMMY:
            _write_hollow(part, SHAPES[name])
        else:
            _write_random(part, SHAPES[name], seed, device)
        part.replace(folder / WEIGHTS)
    return folder


def _write_random(path: Path, shape: Shape, seed: int, device: str) -> None:
    import torch
    from safetensors.torch import save_file

    chance, found = torch.Generator(device).manual_seed(seed), {}
    for name, size in tensors_of(shape).items():
        if name.endswith("norm.weight"):
            found[name] = torch.ones(size, dtype=torch.bfloat16)
            continue
        ends = "embed_tokens" in name or "lm_head" in name
        scale = DEVIATION / shape.hidden**0.5 if ends else size[-1] ** -0.5
        made = torch.randn(size, generator=chance, device=device, dtype=torch.float32) * scale
        found[name] = made.to(torch.bfloat16).cpu()
    save_file(found, path, metadata={"format": "pt"})


def _write_hollow(path: Path, shape: Shape) -> None:
    """Writes a sparse file of weights: the header, then a hole in place of the values. Readers of shapes find them
    there, and the hole uses no disk.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in tensors_of(shape).items():
        end = at + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def _write_settings(folder: Path, shape: Shape) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape.vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2", "unk_token": "t0"}
    config = {
        "model_type": shape.kind, "architectures": [CLASSES[shape.kind]], "hidden_size": shape.hidden,
        "intermediate_size": shape.inner, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head, "vocab_size": shape.vocabulary,
        "max_position_embeddings": LENGTH, "eos_token_id": 2, "bos_token_id": 1, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 10_000.0, "tie_word_embeddings": shape.tied,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    if shape.experts:
        config |= {"num_experts": shape.experts, "num_experts_per_tok": shape.chosen, "norm_topk_prob": True}
        config |= {"moe_intermediate_size": shape.inner}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": LENGTH}))
    (folder / "config.json").write_text(json.dumps(config))
