"""Names of a step's prompts: they enter the sample keys, so they depend on the data and never on arrival.

A group is named after its call within the step and its place there. A later turn of a sample, whose prompt begins with
all of the sample so far, is named after that sample.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A prompt that is sent to the service. `first_tokens`: length of the sample's first prompt, in tokens."""

    prompt_id: str
    first_tokens: int


class Turns:
    """The prompts of one step in the order of their calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._ended: dict[tuple[int, ...], list[tuple[str, Turn]]] = {}  # tokens of a sample so far -> samples
        self._lengths: set[int] = set()

    def call(self, prompts: list[list[int]], samples: int) -> list[Turn]:
        """Returns names for the prompts of one call, which requests `samples` samples of each."""
        turns = [
            (self._next_turn(prompt) if samples == 1 else None) or Turn(f"{self.calls}.{place}", len(prompt))
            for place, prompt in enumerate(prompts)
        ]
        self.calls += 1
        return turns

    def ended(self, turn: Turn, sample_index: int, tokens: list[int]) -> None:
        """Records a sample: `tokens` are its prompt and its answer."""
        name = f"{turn.prompt_id}/{sample_index}"
        self._ended.setdefault(tuple(tokens), []).append((name, turn))
        self._lengths.add(len(tokens))

    def _next_turn(self, prompt: list[int]) -> Turn | None:
        """Returns the turn after the longest sample that `prompt` begins with, or None. Equal samples are used in
        order.
        """
        for length in sorted(self._lengths, reverse=True):
            found = self._ended.get(tuple(prompt[:length])) if length < len(prompt) else None
            if found:
                name, turn = found.pop(0)
                return Turn(name, turn.first_tokens)
        return None
