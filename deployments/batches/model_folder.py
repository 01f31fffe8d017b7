"""Facts about a model that its folder states besides the weights. Read by `Prompts`."""

import json
from pathlib import Path

MEDIA = ("vision", "image", "img", "audio", "video", "visual")
"""Parts of the keys about images, videos or sounds in a model's config.json."""

WHOLE_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of the class that takes all of a tokenizer from tokenizer.json, in transformers 5 and before."""


def end_tokens(folder: Path, eos_token_id: int | None) -> frozenset[int]:
    """Returns the tokens that end an answer of a model: the tokenizer's, and those in its generation_config.json."""
    file = folder / "generation_config.json"
    given = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    more = given if isinstance(given, list) else [given]
    return frozenset(token for token in (eos_token_id, *more) if token is not None)


def names_media(folder: Path) -> bool:
    """Returns whether a model's config.json has a key about images, videos or sounds. A text-only model has none."""
    return any(word in key for key in json.loads((folder / "config.json").read_text()) for word in MEDIA)


def tokenizer_of(folder: Path):
    """Returns the tokenizer that transformers' AutoTokenizer gives. Raises OSError or ValueError as it does.

    Its import loads torch: 8 s of a processor core and 400 MB, which a folder that names the plain class needs not.
    """
    if _has_whole_tokenizer(folder):
        from transformers.tokenization_utils_tokenizers import TokenizersBackend as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    return Tokenizer.from_pretrained(folder, local_files_only=True)


def _has_whole_tokenizer(folder: Path) -> bool:
    """Returns whether AutoTokenizer takes the plain class: for a Llama it does where that is named."""
    files = folder / "config.json", folder / "tokenizer_config.json"
    if not all(file.is_file() for file in (*files, folder / "tokenizer.json")):
        return False
    model, tokenizer = (json.loads(file.read_text()) for file in files)
    named = tokenizer.get("tokenizer_class") in WHOLE_CLASSES and "auto_map" not in tokenizer
    return named and model.get("model_type") == "llama"
