"""Draft window of one sample: the lead of a draft model over verification, the cost of a wrong token (SpecActor 4.1).

A drafter that has sent w tokens may draft w more; a coupled one waits for the verifier after the first w. A wrong draft
token therefore wastes at most 2w - 1 tokens after it, or w - 1 if coupled. Invariant: drafted tokens end at most 2w (w)
after the confirmed ones; after a change to a narrower mode, drafting pauses until that holds. Confirmed tokens only
grow, by the verifier's own tokens. Positions are those of the context: 0 is the first token of the prompt. Pure; owned
by `Sessions`, one for each sample.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.policies.protocol.actions import DraftMode


class Judged(NamedTuple):
    """Outcome of a confirmation: accepted draft tokens, and tokens wasted by a wrong one, or None if none was wrong.

    `resumes`: the model continues from its own position; else from the confirmed context, new to it.
    """

    accepted: int
    wasted: int | None
    resumes: bool


class Window:
    """Window of a sample with `confirmed` known tokens; drafts end before position `end`."""

    __slots__ = ("ahead", "confirmed", "end", "guess", "stopped")

    def __init__(self, confirmed: int, end: int, mode: DraftMode):
        self.confirmed = confirmed
        self.turn(end, mode)
        self.guess: list[int] = []  # draft tokens from position `confirmed`
        self.stopped = False  # the last draft token ends the sample

    def turn(self, end: int, mode: DraftMode) -> None:
        """Changes the mode, and the position before which drafts end."""
        self.end, self.ahead = end, mode.window if mode.coupled else 2 * mode.window

    @property
    def reached(self) -> int:
        """Position of the next draft token."""
        return self.confirmed + len(self.guess)

    @property
    def room(self) -> int:
        """Number of tokens that may be drafted now."""
        if self.stopped:
            return 0
        return max(0, min(self.ahead, self.end - self.confirmed) - len(self.guess))

    def draft(self, tokens: Sequence[int], stopped: bool = False) -> None:
        """Appends drafted tokens. Raises ValueError if there is no room for them."""
        if len(tokens) > self.room:
            raise ValueError(f"{len(tokens)} tokens drafted, there was room for {self.room}")
        self.guess += tokens
        self.stopped = stopped

    def confirm(self, start: int, tokens: Sequence[int]) -> Judged:
        """Takes the sample's tokens from position `start`; known ones are skipped. Raises ValueError on a gap."""
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
