"""Chunks, races and replicas of a recorded run as values. Seconds count from the run's first submission.

Invariant: a chunk's times lie within the run; of a race's runners at most one has won. `lab/timeline/record.py` makes
them from a journal; roles, figures, page and picture read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from tailrace.lab.simulator.types import Ended, Span

OWNER = "owner"
"""Name in place of the draft method of a runner that has none: it continues as before the race."""


COUNTS = ("verifications", "drafted_tokens", "accepted_tokens", "pulled_tokens", "computed_tokens")
"""Counts at a chunk's end; 0 in journals of cores that did not record them."""


class ReplicaLifetime(NamedTuple):
    """A replica was up from begin_s to end_s. `closing_s`: when it began to close, or None if it never did."""

    begin_s: float
    end_s: float
    closing_s: float | None = None


@dataclass(slots=True)
class RecordedChunk:
    """One chunk on one replica, which is a number: its place in the order of joining.

    `silent_s`: time of the last report without a token of the chunk, or begin_s if there was no such report: then the
    chunk may have been silent for up to one report longer. `seen`: a later report had tokens. `race`: the id of the
    chunk that it races with, its own id if others copy it, or None outside races. `won`: None while a race is
    undecided. `end`: stop, length, aborted, failed, lost, or running if the journal ends before the chunk. `error`: why
    the chunk was aborted, failed or lost. `stopping`: the chunk was aborted and has not ended yet. `beaten_s`: time
    from which it only had to stop, since its race was over.
    """

    chunk_id: str
    sample_id: str
    replica: int
    begin_s: float
    start: int
    context_tokens: int
    reason: str
    method: str | None = None
    race: str | None = None
    silent_s: float = 0.0
    seen: bool = False
    end_s: float = 0.0
    new_tokens: int = 0
    stopping: bool = False
    end: str = "running"
    error: str = ""
    won: bool | None = None
    beaten_s: float = inf
    weights_version: int = 0
    verifications: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    pulled_tokens: int = 0
    computed_tokens: int = 0
    expected_tokens: int = 0  # length of the whole answer, as estimated at its start

    def count(self, event) -> None:
        """Records the counts of the chunk's `ChunkFinished`."""
        self.new_tokens = event.new_tokens
        for name in COUNTS:
            setattr(self, name, getattr(event, name, 0))

    @property
    def is_copy(self) -> bool:
        return self.race not in (None, self.chunk_id)

    @property
    def counts(self) -> bool:
        """Whether its tokens are its sample's: those of a copy that has lost its race are not."""
        return not (self.is_copy and self.won is False)

    def spans(self) -> list[Span]:
        """Returns one span, or two: until its first token was seen, and after it. Chunks of a race are not divided."""
        if self.race is not None:
            role = {True: "won", False: "lost", None: "race"}[self.won]
            return [self._span(role, self.begin_s, self.end_s, self.new_tokens)]
        parts = [self._span("generate", self.silent_s, self.end_s, self.new_tokens)]
        if self.silent_s > self.begin_s:
            parts.insert(0, self._span("prefill", self.begin_s, self.silent_s, self.context_tokens))
        return parts

    def _span(self, role: str, begin_s: float, end_s: float, tokens: int) -> Span:
        return Span(
            replica=self.replica,
            sample_id=self.sample_id,
            role=role,
            begin_s=begin_s,
            end_s=end_s,
            tokens=tokens,
            verifications=0 if role == "prefill" else self.verifications,
            note=self._note(),
        )

    def _note(self) -> str:
        """Returns a note. Few notes differ, since a page keeps each of them once."""
        words = [self.reason]
        if self.race is not None:
            words.append({True: "won the race", False: "lost the race", None: "races"}[self.won])
            words.append(f"with {self.method or OWNER}")
        if self.end in ("failed", "lost", "aborted", "running") and not (self.end == "aborted" and self.won is False):
            words.append(f"{self.end}: {self.error}" if self.error else self.end)
        return ", ".join(words)


@dataclass(slots=True)
class RecordedRace:
    """Chunks that make the same tokens: the first of `runners` began before the others; `winner` ended first.

    `original`: the runner whose end is the end of the race, even if it is aborted. It is the first runner, or the copy
    that replaced a lost one, or None if no runner is left for that. An aborted copy only leaves the race. At exactness
    `law` no copy wins, nor replaces a lost one: it may have other tokens.
    """

    runners: list[RecordedChunk]
    original: RecordedChunk | None
    winner: RecordedChunk | None = None

    def as_json(self, names: Sequence[str]) -> dict:
        runners = [{"replica": names[chunk.replica], "method": chunk.method or OWNER} for chunk in self.runners]
        ended_s = max(chunk.end_s for chunk in self.runners) if self.winner is None else self.winner.end_s
        return {
            "sample": self.runners[0].sample_id,
            "began_s": round(self.runners[1].begin_s, 3),
            "ended_s": round(ended_s, 3),
            "runners": runners,
            "winner": None if self.winner is None else runners[self.runners.index(self.winner)],
        }


@dataclass(slots=True)
class RecordedSample:
    """`where`: the replica of the sample's last chunk, copies only if they won; None before the first chunk. `batch`: a
    number. `prompt_tokens`: context tokens that were not generated, those between turns included. `holds`: the times
    between two turns, in which it is its driver's turn: (begin, end) in seconds, the end inf if the journal has none.
    """

    batch: int
    prompt_tokens: int
    submitted_s: float
    where: int | None = None
    chunks: list[RecordedChunk] = field(default_factory=list)
    moves: int = 0
    ended_s: float | None = None
    end: str = ""
    max_tokens: int = 0  # maximum of the first turn
    holds: list[tuple[float, float]] = field(default_factory=list)

    def is_held(self, at_s: float) -> bool:
        return any(begin_s <= at_s < end_s for begin_s, end_s in self.holds)

    def held_s(self, until_s: float) -> float:
        """Returns the seconds between turns up to a moment."""
        return sum(max(0.0, min(end_s, until_s) - begin_s) for begin_s, end_s in self.holds)

    @property
    def tokens(self) -> int:
        """Number of known answer tokens. Copies that have lost do not count: at exactness `law` they may be longer."""
        return max((chunk.start + chunk.new_tokens for chunk in self.chunks if chunk.counts), default=0)

    def as_ended(self, sample_id: str) -> Ended:
        """Returns the ended sample. Its drafts are those of all its chunks, copies included."""
        return Ended(
            sample_id=sample_id,
            step=self.batch,
            tokens=self.tokens,
            submitted_s=self.submitted_s,
            ended_s=self.ended_s,
            chunks=len(self.chunks),
            moves=self.moves,
            preemptions=0,
            recomputed_tokens=0,
            verifications=sum(chunk.verifications for chunk in self.chunks),
            drafted=sum(chunk.drafted_tokens for chunk in self.chunks),
            accepted=sum(chunk.accepted_tokens for chunk in self.chunks),
        )
