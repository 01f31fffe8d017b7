"""Survey of a service's samples in rounds: the longest ones, tokens of each batch, and the number that wait for each
cause.

A look reads PART samples, so a small service is read whole at each look, and 50,000 samples in 17. Invariant: the
figures are those of the last finished round. Called by `Looks`.
"""

from collections import Counter
from heapq import nlargest

from tailrace.policies.core.request_buffer import Sample
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.sample_states import ENDED, HELD, WAITING

PART = 3_000
"""Number of samples read in a look: 2 ms."""

LONGEST = 64
"""Number of samples that are shown."""

CANDIDATES = 4 * LONGEST
"""Number of candidates of a round; each look chooses those shown from them."""


def tokens_of(sample: Sample) -> int:
    """Returns the sample's answer tokens, those of its running chunk as last reported."""
    return sample.generated_tokens + sample.streamed_tokens


class Survey:
    """`tokens`: by batch, tokens of the groups that have not been delivered. `waiting`: number of samples by cause."""

    def __init__(self):
        self.tokens: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._candidates: list[Sample] = []
        self._left: list[Sample] = []
        self._next_tokens: Counter[str] = Counter()
        self._next_waiting: Counter[str] = Counter()
        self._next: list[Sample] = []

    def look(self, core: RolloutCore) -> None:
        """Reads the next part of the samples."""
        if not self._left:
            self._left = core.samples()
        part, self._left = self._left[:PART], self._left[PART:]
        tokens, waiting, unended = self._next_tokens, self._next_waiting, []
        for sample in part:
            if sample.state is ENDED:
                tokens[sample.group.batch.batch_id] += sample.generated_tokens
                continue
            tokens[sample.group.batch.batch_id] += sample.generated_tokens + sample.streamed_tokens
            if sample.generated_tokens or sample.streamed_tokens or len(unended) < CANDIDATES:
                unended.append(sample)
            if sample.state is WAITING:
                waiting[core.room_wanted(sample)] += 1
            elif sample.state is HELD:
                waiting["its next turn"] += 1
        self._next = nlargest(CANDIDATES, self._next + unended, key=tokens_of)
        if not self._left:
            self.tokens, self.waiting, self._candidates = tokens, waiting, self._next
            self._next_tokens, self._next_waiting, self._next = Counter(), Counter(), []

    def longest(self) -> list[Sample]:
        """Returns the longest unended samples, longest first."""
        unended = [sample for sample in self._candidates if sample.state is not ENDED]
        return nlargest(LONGEST, unended, key=tokens_of)
