"""Compares the vocabularies of a drafter and its target: drafts are sent as token ids, without translation.

Owns the comparison of two model folders. Invariant: without a refusal, every id that the drafter can propose is
the same token in the target. Called before a draft model is started for a target.
"""

import json
from pathlib import Path

SPECIAL = ("bos_token", "eos_token")
"""Tokens at the start and end of a sequence. Padding is left out: no sample holds any."""


def vocabulary_refusal(target: Path, drafter: Path) -> str | None:
    """Returns the difference between two Hugging Face folders' vocabularies, in one line, or None if there is none.

    A drafter may have fewer outputs than the target if the tokens agree (both may be padded), never more. Raises
    OSError or ValueError if a folder has no tokenizer or no config.json.
    """
    (known, ours), (drafted, theirs) = _tokens(target), _tokens(drafter)
    said = f"the drafter {drafter.name} does not share the vocabulary of {target.name}: "
    if len(known) != len(drafted):
        return f"{said}it has {len(drafted)} tokens, the target {len(known)}"
    for token, place in sorted(known.items(), key=lambda item: item[1]):
        if drafted.get(token) != place:
            there = f"id {drafted[token]}" if token in drafted else "absent"
            return f"{said}token {token!r} is id {place} in the target, {there} in the drafter"
    for name in SPECIAL:
        if ours[name] != theirs[name]:
            return f"{said}its {name} is {theirs[name]!r}, the target's {ours[name]!r}"
    wide, taken = outputs(drafter), outputs(target)
    return f"{said}it puts out {wide} ids, the target takes {taken}" if wide > taken else None


def _tokens(folder: Path) -> tuple[dict[str, int], dict[str, str | None]]:
    """Returns the ids of all tokens, and the SPECIAL tokens by name."""
    from tokenizers import Tokenizer

    whole, named = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (whole.is_file() and named.is_file()):  # an older format: transformers reads them all, but takes seconds
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer.get_vocab(), {name: getattr(tokenizer, name) for name in SPECIAL}
    entries = json.loads(named.read_text())
    found = {name: entries.get(name) for name in SPECIAL}
    specials = {name: entry["content"] if isinstance(entry, dict) else entry for name, entry in found.items()}
    return Tokenizer.from_file(str(whole)).get_vocab(), specials


def outputs(folder: Path) -> int:
    """Returns the number of a model's output ids; ids above the tokenizer's are padding. Raises as above."""
    config = json.loads((folder / "config.json").read_text())
    try:
        return int(config.get("text_config", config)["vocab_size"])
    except KeyError:
        raise ValueError(f"{folder}/config.json names no vocab_size") from None
