"""An engine's lines to its draft models: one for each sample, for as long as the engine makes tokens of it.

A line outlives its chunks: it is kept when a chunk ends whose sample continues, and the sample's next chunk takes it up
with whatever has been made meanwhile, so that a drafter which needs longer than a chunk to compute the context gets
there in a later one. Invariant: at most MOST_KEPT lines are kept, none of them for longer than KEPT_S. Pure;
owned by `Drafters`.
"""

from dataclasses import dataclass, field

from tailrace.deployments.drafter.server import Address
from tailrace.deployments.drafter.wire import Guess
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.policies.protocol.actions import DraftMode

KEPT_S = 20.0
"""Longest that a line is kept without a chunk: by then its sample has gone on elsewhere. Drafters wait 60 s."""

MOST_KEPT = 256
"""Lines without a chunk; beyond them the one that has been kept longest goes. More than chunks run in one engine."""

MOST_LATE = 4
"""Waits in a row that brought no draft in time; each is twice as long as the one before: 0.5, 1, 2, 4 s."""

MOST_ALONE = 1000
"""Verifications in a row without a guess. Counted in these, since a machine on which they take long computes contexts
slowly too; at 50 ms each a drafter has 50 s to get there."""

Sample = tuple[str, int]
"""Its group's name, and its number there."""


@dataclass(slots=True)
class Line:
    """`tokens`: the sample's context, as the engine has made it so far."""

    chunk: ChunkRequest  # that runs, or ran last
    way: DraftMode
    tokens: list[int]
    address: Address | None = None  # of its drafter; None: there is none
    name: str = ""  # by which its drafter knows it
    guess: list[int] = field(default_factory=list)  # for what follows `tokens`
    patience_s: float = 0.0
    since_s: float = 0.0  # that it has had no guess, has been waited for again, or has been kept
    silent: bool = False  # waits no more until its drafter speaks
    late: int = 0  # waits in a row that brought no draft
    alone: int = 0  # verifications in a row without a guess
    joined: bool = False  # its drafter has sent something that came in time
    given_back: bool = False  # nobody drafts for it until the drafters change
    accepted: float = 0.0  # of
    tested: float = 0.0  # draft tokens that were verified, both faded
    judged: tuple[int, int] = (0, 0)  # in this chunk: drafts whose turn came, those that were right
    said: tuple[int, int] = (0, 0)  # the same since it was opened, as its drafter said last

    @property
    def sample(self) -> Sample:
        return self.chunk.draft.group.group_id, self.chunk.draft.sample_index

    @property
    def hopeless(self) -> bool:
        """Whether its drafter never joins, and had better draft for others."""
        return self.address is not None and (self.late >= MOST_LATE or self.alone >= MOST_ALONE)

    def extends_to(self, chunk: ChunkRequest) -> bool:
        """Whether the chunk continues with this very sample, and its tokens with these."""
        ours, known = self.chunk, len(self.tokens)
        same = (ours.sample_key, ours.prompt_tokens) == (chunk.sample_key, chunk.prompt_tokens)
        return same and ours.sampling == chunk.sampling and chunk.token_ids[:known].tolist() == self.tokens

    def made(self, tokens: list[int], now_s: float) -> None:
        """The sample has these tokens more, by one verification."""
        self.alone = 0 if self.guess else self.alone + 1
        self.follow(tokens, now_s)

    def follow(self, tokens: list[int], now_s: float) -> None:
        """It has these tokens more, from wherever; its drafter is told, and waited for from now on."""
        self.tokens += tokens
        self.guess = behind(self.guess, tokens)
        self.since_s = now_s

    def waits(self, now_s: float) -> bool:
        """Whether it is still patient; not asked again after it has lost patience, until its drafter speaks."""
        if now_s - self.since_s <= self.patience_s:
            return True
        self.silent, self.late, self.patience_s = True, self.late + 1, 2 * self.patience_s
        return False

    def hear(self, said: Guess, least_patience_s: float, now_s: float) -> bool:
        """Its drafter has said this; False when it has been overtaken.

        One that speaks is near, and is waited for again; one that was in time sets how long: twice as long as it took.
        """
        guess, known = said.tokens, self.tokens[said.start :]
        in_time = len(guess) > len(known) and guess[: len(known)] == known
        if in_time:
            if not self.silent and not self.guess:
                self.patience_s = max(least_patience_s, 2 * (now_s - self.since_s))
            self.guess, self.late, self.joined = guess[len(known) :], 0, True
        if self.silent:
            self.silent, self.since_s = False, now_s
        return in_time

    def count(self, tested: int, accepted: int) -> None:
        """So many drafts since the line was opened, as its drafter says; it may have forgotten the first of them."""
        before = self.said if tested >= self.said[0] and accepted >= self.said[1] else (0, 0)
        self.said = tested, accepted
        tested, accepted = tested - before[0], accepted - before[1]
        self.judged = self.judged[0] + tested, self.judged[1] + min(tested, accepted)

    def take_judged(self) -> tuple[int, int]:
        """Drafts whose turn came in this chunk, and those that were right."""
        judged, self.judged = self.judged, (0, 0)
        return judged


class Kept:
    """Lines without a chunk, the one kept longest first."""

    def __init__(self):
        self._lines: dict[Sample, Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def put(self, line: Line, now_s: float) -> list[Line]:
        """Keep it; those that are given up for it."""
        given_up = [old] if (old := self._lines.pop(line.sample, None)) is not None else []
        line.since_s = now_s
        self._lines[line.sample] = line
        if len(self._lines) > MOST_KEPT:
            given_up.append(self._lines.pop(next(iter(self._lines))))
        return given_up

    def take(self, sample: Sample) -> Line | None:
        return self._lines.pop(sample, None)

    def take_old(self, now_s: float) -> list[Line]:
        """Those that have been kept long enough."""
        until_s = now_s - KEPT_S
        return [self._lines.pop(line.sample) for line in list(self._lines.values()) if line.since_s <= until_s]

    def take_all(self) -> list[Line]:
        lines, self._lines = list(self._lines.values()), {}
        return lines


def chunk_end(chunk: ChunkRequest) -> int:
    """Position of the chunk's last token, which is never a draft's."""
    return len(chunk.token_ids) + chunk.max_tokens - 1


def end_of(chunk: ChunkRequest) -> int:
    """Position from which on no draft is wanted: that of the sample's last token."""
    most = chunk.draft.most_tokens
    return chunk_end(chunk) if most is None else chunk.prompt_tokens + most - 1


def behind(guess: list[int], tokens: list[int]) -> list[int]:
    """What is left of a guess when these tokens have come; nothing, when one of them is another."""
    return guess[len(tokens) :] if guess[: len(tokens)] == tokens else []
