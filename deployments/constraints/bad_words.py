"""Bad words as tokens, as vLLM does it: a word is banned at the start of a text, and after a space.

Called by the coordinator and by engines, which refuse the same words. Formula: vLLM 0.32,
`SamplingParams.update_from_tokenizer`.
"""

from collections.abc import Callable, Sequence

MAX_BAD_WORDS = 128
"""Maximum number of token sequences, two forms of each word: vLLM's own limit. Each is checked at each token."""

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
