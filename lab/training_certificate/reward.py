"""The reward of the certificate: a number that differs between answers, so that each group has a gradient."""

from hashlib import blake2b


def digest_share(prompt: object, completion: str, answer: str | None) -> float:
    """Returns a number from 0 to 1 that any change of a completion changes, whatever the model writes."""
    return int.from_bytes(blake2b(completion.encode(), digest_size=4).digest()) / 2**32
