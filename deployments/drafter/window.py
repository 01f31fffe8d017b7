"""How far a draft model may run ahead of one sample's verification, and what a wrong token costs (SpecActor 4.1).

Having sent w tokens, a drafter may draft w more; one that is coupled waits for the verifier after the first w. So a
wrong draft token wastes at most 2w - 1 behind it, or w - 1. Invariant: what is drafted ends at most so far behind what
is confirmed (where the way has just become a narrower one, nothing is drafted until that is so), and what is confirmed
only grows, by the verifier's own tokens. Positions are those of the context: 0 is the first token of the prompt. Pure;
owned by `Sessions`, one for each sample.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.policies.protocol.actions import DraftMode


class Judged(NamedTuple):
    """What a confirmation says of the drafts: how many it accepts, and what a wrong one wasted (None: none was wrong).

    `resumes`: the model continues where it stands; else from the confirmed context, which it has not seen.
    """

    accepted: int
    wasted: int | None
    resumes: bool


class Window:
    """Of a sample whose first `confirmed` tokens are known; nothing is drafted at or behind position `end`."""

    __slots__ = ("ahead", "confirmed", "end", "guess", "stopped")

    def __init__(self, confirmed: int, end: int, way: DraftMode):
        self.confirmed = confirmed
        self.turn(end, way)
        self.guess: list[int] = []  # the tokens from position `confirmed` on
        self.stopped = False  # the last of them ends the sample

    def turn(self, end: int, way: DraftMode) -> None:
        """From now on it is drafted for in this way, up to this position."""
        self.end, self.ahead = end, way.window if way.coupled else 2 * way.window

    @property
    def reached(self) -> int:
        """Position of the next draft token."""
        return self.confirmed + len(self.guess)

    @property
    def room(self) -> int:
        """Tokens that may be drafted now."""
        if self.stopped:
            return 0
        return max(0, min(self.ahead, self.end - self.confirmed) - len(self.guess))

    def draft(self, tokens: Sequence[int], stopped: bool = False) -> None:
        """The model has drafted these. Raises ValueError where there is no room for them."""
        if len(tokens) > self.room:
            raise ValueError(f"{len(tokens)} tokens drafted, there was room for {self.room}")
        self.guess += tokens
        self.stopped = stopped

    def confirm(self, start: int, tokens: Sequence[int]) -> Judged:
        """The sample has these tokens from position `start` on; known ones are skipped. ValueError where some lack."""
        if start > self.confirmed:
            raise ValueError(f"confirmed from {start} on, but only {self.confirmed} tokens are known")
        tokens = tokens[self.confirmed - start :]
        guess, count = self.guess, len(tokens)
        accepted = next((i for i, (a, b) in enumerate(zip(guess, tokens, strict=False)) if a != b), None)
        self.confirmed += count
        if accepted is not None:
            self.guess, self.stopped = [], False
            return Judged(accepted, len(guess) - accepted - 1, False)
        self.guess = guess[count:]
        self.stopped = self.stopped and bool(self.guess)
        return Judged(min(count, len(guess)), None, count <= len(guess))
