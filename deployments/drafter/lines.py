"""The engine's lines to its draft models: one for each sample, while the engine generates its tokens.

A line outlives its chunks. If a chunk ends and its sample continues, the line is kept. The sample's next chunk resumes
it with the tokens generated meanwhile, so a drafter that needs longer than a chunk to compute the context is ready in
a later one. Invariant: at most MAX_KEPT lines are kept, none of them for longer than KEPT_S. Pure; owned by `Drafters`.
"""

from dataclasses import dataclass, field

from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.drafter.wire import Guess
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.performance import FADE

KEPT_S = 20.0
"""Maximum seconds that a line is kept without a chunk: by then its sample runs elsewhere. Drafters wait 60 s."""

MAX_KEPT = 256
"""Maximum number of lines without a chunk, more than the chunks that run in one engine; beyond that the oldest is
dropped.
"""

MAX_LATE = 4
"""Maximum number of consecutive waits without a draft in time; each is twice as long as the previous one: 0.5, 1, 2, 4
s.
"""

MAX_ALONE = 1000
"""Maximum number of consecutive verifications without a guess. The unit is verifications, since a machine with slow
ones computes contexts slowly too; at 50 ms each a drafter has 50 s to join.
"""

Sample = tuple[str, int]
"""Group id, and index of the sample in the group."""


@dataclass(slots=True)
class Line:
    """One sample's connection to its drafter. `tokens`: the sample's context so far, as the engine has it."""

    chunk: ChunkRequest  # the running one, or the last one
    mode: DraftMode
    tokens: list[int]
    address: Address | None = None  # address of its drafter, or None without one
    name: str = ""  # the drafter's name for it
    guess: list[int] = field(default_factory=list)  # the draft after `tokens`
    patience_s: float = 0.0
    since_s: float = 0.0  # start of the time without a guess, of the current wait, or of its keeping
    silent: bool = False  # no more waits until its drafter sends a guess
    late: int = 0  # consecutive waits without a draft
    alone: int = 0  # consecutive verifications without a guess
    joined: bool = False  # its drafter has sent a guess in time
    reopened: bool = False  # opened because its drafter did not know it
    given_back: bool = False  # no drafter drafts for it until the drafters change
    right: float = 0.0  # draft tokens of `tested`, faded
    tested: float = 0.0  # draft tokens, verified or overtaken, faded
    judged: tuple[int, int] = (0, 0)  # in this chunk: tested draft tokens, right ones
    reported: tuple[int, int] = (0, 0)  # the same since its opening, by its drafter's last guess

    @property
    def sample(self) -> Sample:
        return self.chunk.draft.group.group_id, self.chunk.draft.sample_index

    @property
    def hopeless(self) -> bool:
        """True if its drafter has failed to join for so long that it should draft for others."""
        return self.address is not None and (self.late >= MAX_LATE or self.alone >= MAX_ALONE)

    def extends_to(self, chunk: ChunkRequest) -> bool:
        """Returns whether the chunk continues this same sample, and its tokens begin with these."""
        ours, known = self.chunk, len(self.tokens)
        same = (ours.sample_key, ours.prompt_tokens) == (chunk.sample_key, chunk.prompt_tokens)
        return same and ours.sampling == chunk.sampling and chunk.token_ids[:known].tolist() == self.tokens

    def made(self, tokens: list[int], now_s: float) -> None:
        """Appends the tokens of one verification."""
        self.alone = 0 if self.guess else self.alone + 1
        self.follow(tokens, now_s)

    def follow(self, tokens: list[int], now_s: float) -> None:
        """Appends tokens of any origin; the caller sends them to the drafter, and a wait starts now."""
        self.tokens += tokens
        self.guess = remaining(self.guess, tokens)
        self.since_s = now_s

    def waits(self, now_s: float) -> bool:
        """Returns whether the wait is within `patience_s`; not called again after a False until its drafter sends a
        guess.
        """
        if now_s - self.since_s <= self.patience_s:
            return True
        self.silent, self.late, self.patience_s = True, self.late + 1, 2 * self.patience_s
        return False

    def hear(self, message: Guess, min_patience_s: float, now_s: float) -> bool:
        """Takes a guess of its drafter. Returns whether it was in time, False if it was overtaken.

        After any guess the line waits for its drafter again. A guess in time sets the patience to twice its own delay.
        """
        guess, known = message.tokens, self.tokens[message.start :]
        in_time = len(guess) > len(known) and guess[: len(known)] == known
        if in_time:
            if not self.silent and not self.guess:
                self.patience_s = max(min_patience_s, 2 * (now_s - self.since_s))
            self.guess, self.late, self.joined = guess[len(known) :], 0, True
        if self.silent:
            self.silent, self.since_s = False, now_s
        return in_time

    def count(self, tested: int, accepted: int) -> tuple[int, int]:
        """Takes the drafter's totals since the opening; they restart if the drafter has forgotten the sample. Returns
        the draft tokens tested since the last totals, and the right ones.
        """
        before = self.reported if tested >= self.reported[0] and accepted >= self.reported[1] else (0, 0)
        self.reported = tested, accepted
        tested = tested - before[0]
        right = min(tested, accepted - before[1])
        self.judged = self.judged[0] + tested, self.judged[1] + right
        if tested:
            self.right, self.tested = FADE * self.right + right, FADE * self.tested + tested
        return tested, right

    def take_judged(self) -> tuple[int, int]:
        """Returns the tested draft tokens of this chunk and the right ones, and resets both."""
        judged, self.judged = self.judged, (0, 0)
        return judged


class Kept:
    """Lines without a chunk, oldest first."""

    def __init__(self):
        self._lines: dict[Sample, Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def put(self, line: Line, now_s: float) -> list[Line]:
        """Keeps a line. Returns the lines dropped in its place."""
        given_up = [old] if (old := self._lines.pop(line.sample, None)) is not None else []
        line.since_s = now_s
        self._lines[line.sample] = line
        if len(self._lines) > MAX_KEPT:
            given_up.append(self._lines.pop(next(iter(self._lines))))
        return given_up

    def take(self, sample: Sample) -> Line | None:
        return self._lines.pop(sample, None)

    def take_old(self, now_s: float) -> list[Line]:
        """Removes and returns the lines kept for KEPT_S or longer."""
        until_s = now_s - KEPT_S
        return [self._lines.pop(line.sample) for line in list(self._lines.values()) if line.since_s <= until_s]

    def take_all(self) -> list[Line]:
        lines, self._lines = list(self._lines.values()), {}
        return lines


def chunk_end(chunk: ChunkRequest) -> int:
    """Returns the position of the chunk's last token, which is never drafted."""
    return len(chunk.token_ids) + chunk.max_tokens - 1


def end_of(chunk: ChunkRequest) -> int:
    """Returns the first position without drafts: that of the sample's last token."""
    limit = chunk.draft.most_tokens
    return chunk_end(chunk) if limit is None else chunk.prompt_tokens + limit - 1


def remaining(guess: list[int], tokens: list[int]) -> list[int]:
    """Returns the rest of a guess after these tokens of the sample; empty if they disagree with it."""
    return guess[len(tokens) :] if guess[: len(tokens)] == tokens else []
