"""Facts about a model that its folder states besides the weights. Read by `Prompts`."""

import json
from pathlib import Path

MEDIA = ("vision", "image", "img", "audio", "video", "visual")
"""Parts of the keys about images, videos or sounds in a model's config.json."""


def end_tokens(folder: Path, eos_token_id: int | None) -> frozenset[int]:
    """Returns the tokens that end an answer of a model: the tokenizer's, and those in its generation_config.json."""
    file = folder / "generation_config.json"
    given = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    more = given if isinstance(given, list) else [given]
    return frozenset(token for token in (eos_token_id, *more) if token is not None)


def names_media(folder: Path) -> bool:
    """Returns whether a model's config.json has a key about images, videos or sounds. A text-only model has none."""
    return any(word in key for key in json.loads((folder / "config.json").read_text()) for word in MEDIA)
