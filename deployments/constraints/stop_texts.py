"""Texts that end a sample, searched for in the answer's last tokens after each token.

Invariant: whether a token ends a sample depends only on the answer's tokens up to it, not on steps or chunks. Called by
the engine, and by the coordinator for the text of an answer.
"""

from collections.abc import Callable, Sequence

SPARE_TOKENS = 4
"""Number of tokens in the window beyond a stop's bytes: its first tokens may lack the start of a character."""

Decode = Callable[[Sequence[int]], str]


def first_end(tokens: Sequence[int], known: int, stops: Sequence[str], min_tokens: int, decode: Decode) -> int | None:
    """Returns the number of an answer's tokens up to the first that completes a stop, or None.

    The first `known` tokens are known to complete none; stops that are complete before `min_tokens` do not count.
    """
    window = max(len(stop.encode()) for stop in stops) + SPARE_TOKENS
    ends = range(max(known + 1, min_tokens, 1), len(tokens) + 1)
    return next((end for end in ends if cut(tokens[max(0, end - window) : end], stops, decode)[1] is not None), None)


def cut(tokens: Sequence[int], stops: Sequence[str], decode: Decode) -> tuple[str, str | None]:
    """Returns the text of an answer up to the first stop that its last token completes, and that stop, or None."""
    text, before = decode(tokens), decode(tokens[:-1]).rstrip("\ufffd")
    found = [(text.find(stop, max(0, len(before) - len(stop) + 1)), stop) for stop in stops]
    at, stop = min((one for one in found if one[0] >= 0), default=(len(text), None))
    return text[:at], stop
