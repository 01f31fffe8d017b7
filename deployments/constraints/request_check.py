"""Checks whether a model can run a request at all: its context, its tokens, and whether its rules leave a token to
draw.

Invariant: coordinator and engines call the same function, so a request is refused where it arrives. The messages
themselves refuse values that do not fit their fields.
"""

from collections.abc import Collection, Iterable, Sequence

from tailrace.deployments.messages.sampling import SamplingParams

NUMBERS = "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
FLOAT32_MAX = 3.4028234663852886e38


def foreign(tokens: Iterable[int], vocabulary: int) -> int | None:
    """Returns the first token that is not in a vocabulary of `vocabulary` tokens, or None."""
    return next((token for token in tokens if not 0 <= token < vocabulary), None)


def sampling_refusal(
    sampling: SamplingParams, vocabulary: int, bad_words: Sequence[Sequence[int]], ends: Collection[int]
) -> str | None:
    """Returns in one line, which names the field, why no token can be drawn by these parameters, or None.

    `bad_words`: in token ids. `ends`: the model's own end-of-sequence tokens; min_tokens forbids them also where they
    would not end the answer.
    """
    for field in NUMBERS:
        if not abs(value := getattr(sampling, field)) <= FLOAT32_MAX:
            return f"{field} is {value}, which is not finite in float32"
    given = {
        "bad_words": [token for word in bad_words for token in word],
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "logit_bias": [token for token, _ in sampling.logit_bias],
    }
    for field, tokens in given.items():
        if (wrong := foreign(tokens, vocabulary)) is not None:
            return f"{field}: {wrong} is not in the vocabulary of {vocabulary} tokens"
    if sampling.allowed_token_ids is None:
        return None
    left = set(sampling.allowed_token_ids) - {word[0] for word in bad_words if len(word) == 1}
    if not left:
        return "allowed_token_ids: bad_words exclude each of them; no token is left"
    if sampling.min_tokens and left <= {*sampling.stop_token_ids, *ends}:
        return "allowed_token_ids: each of them ends the answer, and min_tokens forbids that; no token is left"
    return None
