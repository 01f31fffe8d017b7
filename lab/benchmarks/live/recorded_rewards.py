"""Rewards of a trace for its recorded answers. The learner finds the reward function `reward` by its dotted path."""

import json
from collections.abc import Iterable
from hashlib import blake2b


def key_of(rewarded: Iterable[tuple[str, float]]) -> str:
    """Returns the `answer` of a question: the recorded rewards by digest of the completion, as JSON."""
    return json.dumps({_digest(text): value for text, value in rewarded})


def reward(prompt, completion: str, answer: str) -> float:
    """Returns the recorded reward. Raises KeyError for a completion that was not recorded."""
    return json.loads(answer)[_digest(completion)]


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
