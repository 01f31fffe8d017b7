"""A tiny model that sees (Idefics3, random weights), and features of its images, made without vLLM."""

from base64 import b64encode
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np

IMAGE_TOKENS, IMAGE_ID, SIDE = 4, 258, 32
"""Of one image: its placeholder's tokens, their id, and the pixels of a side."""


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that takes contents in parts."""


def raw(array: np.ndarray) -> list:
    """A tensor as vLLM's encoder writes it."""
    return [array.dtype.name, list(array.shape), msgspec.msgpack.Ext(3, array.tobytes())]


def item(pixels: np.ndarray) -> dict:
    """The fields of one image as vLLM's encoder has them. `pixels`: float32[1, 3, SIDE, SIDE]."""
    flat = ["flat", {"keep_on_cpu": False, "slices": [[[0, 1, None]]], "dim": 0}]
    return {
        "pixel_values": {"data": raw(pixels), "field": flat},
        "pixel_attention_mask": {"data": raw(np.ones((1, SIDE, SIDE), np.int64)), "field": flat},
        "num_patches": {"data": raw(np.array(1, np.int64)), "field": ["batched", {"keep_on_cpu": True}]},
    }


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)


def encoded(fields: dict) -> str:
    return b64encode(msgspec.msgpack.encode(fields)).decode()


def picture(seed: int, kind: str = "PNG", side: int = 40) -> str:
    """An image's file as a `data:` URL; all of one side have equal placeholders."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (side // 4, side // 4, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(noise).resize((side, side)).save(file, kind)
    return f"data:image/{kind.lower()};base64,{b64encode(file.getvalue()).decode()}"


def features(*images: tuple[int, int], length: int = IMAGE_TOKENS, **changes) -> dict:
    """The images of a prompt by (seed, offset), as a request has them."""
    found = {
        "mm_hashes": {"image": ["same"] * len(images)},
        "mm_placeholders": {"image": [{"offset": offset, "length": length} for _, offset in images]},
        "kwargs_data": {"image": [encoded(item(pixels(seed))) for seed, _ in images]},
    }
    return found | changes


def make_image_model(folder: Path) -> None:
    """A Hugging Face folder with a tokenizer of bytes; takes a second, and loads transformers."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    letters = Tokenizer(models.BPE({name: i for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<eos>", "<pad>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    letters.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>", pad_token="<pad>")
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_ID
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text = shape | {"model_type": "llama", "hidden_size": 128, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    text |= {"max_position_embeddings": 4096, "eos_token_id": 256, "bos_token_id": None, "pad_token_id": 257}
    vision = shape | {"hidden_size": 64, "image_size": SIDE, "patch_size": 8}
    config = Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=IMAGE_ID, pad_token_id=257, scale_factor=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    for weight in model.parameters():
        if weight.ndim > 1:  # else random answers hardly depend on the image
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    tokenizer.chat_template = TEMPLATE
    processor = Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
