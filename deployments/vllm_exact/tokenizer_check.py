"""Whether a drafter's tokens mean what the target's do: draft tokens travel as ids, and nothing translates them.

Owns the comparison of two model folders. Invariant: where nothing is refused, every id that the drafter can propose is
the same token of the target's. Called by whatever puts a draft model beside a target, before it starts.
"""

import json
from pathlib import Path

SPECIAL = ("bos_token", "eos_token")
"""Where a sequence begins and ends. Padding is left out: no sample holds any."""


def vocabulary_refusal(target: Path, drafter: Path) -> str | None:
    """One line that says what differs between the vocabularies of two Hugging Face folders; None: nothing does.

    A drafter may have fewer outputs than the target if the tokens agree (both may be padded), never more. Raises
    OSError or ValueError where a folder has no tokenizer or no config.json.
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
    """Ids of all tokens, and the SPECIAL ones by name."""
    from tokenizers import Tokenizer

    whole, named = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (whole.is_file() and named.is_file()):  # an older format: transformers, which takes seconds, knows them all
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer.get_vocab(), {name: getattr(tokenizer, name) for name in SPECIAL}
    entries = json.loads(named.read_text())
    found = {name: entries.get(name) for name in SPECIAL}
    specials = {name: entry["content"] if isinstance(entry, dict) else entry for name, entry in found.items()}
    return Tokenizer.from_file(str(whole)).get_vocab(), specials


def outputs(folder: Path) -> int:
    """How many ids a model folder's model knows; those behind the tokenizer's are padding. Raises as above."""
    config = json.loads((folder / "config.json").read_text())
    try:
        return int(config.get("text_config", config)["vocab_size"])
    except KeyError:
        raise ValueError(f"{folder}/config.json names no vocab_size") from None
