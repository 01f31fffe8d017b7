"""The reward of the certificate: a number that differs between answers, so that each group has a gradient."""


def digit_share(prompt: object, completion: str, answer: str | None) -> float:
    """Digits among the characters of a completion, from 0 to 1."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
