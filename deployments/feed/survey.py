"""Survey of a service's samples: the longest ones, tokens of each batch, and the number that wait for each thing.

A survey that is kept reads PART samples at a time, so it reads a small service whole each time, and 50,000 samples in
17 times. Invariant: the figures are those of the last finished round. Each reader of snapshots has its own.
"""

from collections import Counter
from heapq import nlargest

from tailrace.deployments.feed.trails import Trail
from tailrace.policies.core.request_buffer import Sample
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.sample_states import ENDED, RUNNING, WAITING

PART = 3_000
"""Number of samples read in a look: 2 ms."""

LONGEST = 64
"""Number of samples that a board shows."""

CANDIDATES_EACH = 4
"""Number of candidates of a round for each of the longest samples, which each reading chooses from them."""


def tokens_of(sample: Sample) -> int:
    """Returns the sample's answer tokens, those of its running chunk as last reported."""
    return sample.generated_tokens + (sample.streamed_tokens if sample.state is RUNNING else 0)


def why_of(core: RolloutCore, sample: Sample, trail: Trail | None) -> str:
    """Returns why an unended sample is where it is."""
    if sample.state is not RUNNING:
        return f"waits for {_awaited(core, sample)}"
    return trail.chunks[-1].reason if trail is not None and trail.chunks else ""


def _awaited(core: RolloutCore, sample: Sample) -> str:
    return core.awaited.by(sample) if sample.state is WAITING else "its next turn"


class Survey:
    """`tokens`: by batch, tokens of the groups that have not been delivered. `waiting`: number of samples by the thing
    that they wait for. `count`: number of the longest samples wanted. `part`: samples read at a time; 0: none; None:
    all.
    """

    def __init__(self, count: int = LONGEST, part: int | None = PART):
        self.tokens: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._count, self._part = count, part
        self._candidates: list[Sample] = []
        self._left: list[Sample] = []
        self._next_tokens: Counter[str] = Counter()
        self._next_waiting: Counter[str] = Counter()
        self._next: list[Sample] = []

    def look(self, core: RolloutCore) -> None:
        """Reads the next part of the samples."""
        if self._part == 0:
            return
        if not self._left:
            self._left = core.samples()
        part, self._left = self._left[: self._part], [] if self._part is None else self._left[self._part :]
        tokens, waiting, unended = self._next_tokens, self._next_waiting, []
        for sample in part:
            state, made = sample.state, tokens_of(sample)
            tokens[sample.group.batch.batch_id] += made
            if state is ENDED:
                continue
            if made or len(unended) < CANDIDATES_EACH * self._count:
                unended.append(sample)
            if state is not RUNNING:
                waiting[_awaited(core, sample)] += 1
        self._next = nlargest(CANDIDATES_EACH * self._count, self._next + unended, key=tokens_of)
        if not self._left:
            self.tokens, self.waiting, self._candidates = tokens, waiting, self._next
            self._next_tokens, self._next_waiting, self._next = Counter(), Counter(), []

    def longest(self) -> list[Sample]:
        """Returns the longest unended samples, longest first."""
        unended = [sample for sample in self._candidates if sample.state is not ENDED]
        return nlargest(self._count, unended, key=tokens_of)
