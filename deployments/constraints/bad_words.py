"""Bad words as tokens, in vLLM's way: a word is banned at the begin of a text, and after a space.

Called by the coordinator and by engines: both refuse the same.
Formula: vLLM 0.32, `SamplingParams.update_from_tokenizer`.
"""

from collections.abc import Callable, Sequence

MAX_BAD_WORDS = 128
"""In tokens, both forms of each: vLLM's own bound. Each is looked for at each token."""

Encode = Callable[[str], list[int]]


def word_tokens(words: Sequence[str], encode: Encode) -> list[list[int]]:
    """Returns the token ids of words. Raises ValueError, one line. `encode`: without special tokens."""
    found: list[list[int]] = []
    for word in words:
        plain, spaced = encode(word.lstrip()), encode(f" {word.lstrip()}")
        if not plain:
            raise ValueError(f"bad_words: {word!r} has no token")
        found.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
        if len(found) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words: more than {MAX_BAD_WORDS} in tokens; give fewer")
    return found
