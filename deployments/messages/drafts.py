"""Drafting of a chunk: the plan that an engine gets, and the report that it returns at the chunk's end."""

from dataclasses import dataclass

import numpy as np

from tailrace.deployments.messages.context import GroupRef, Source, bits
from tailrace.policies.families.drafting import Drafting
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.draft_methods import DraftMethod

EVIDENCE = {
    DraftMethod.GROUP: bits(*Source),
    DraftMethod.HISTORY: bits(Source.HISTORY),
    DraftMethod.NGRAM: bits(Source.OWN),
}
"""Draft methods of the index, by the sources that each drafts from. `ngram` is prompt lookup, in the answer too."""

ON_DEVICE = -1
"""A draft token that the host does not know: vLLM's second runner keeps proposals of its own drafter on the device."""


def by_source(tokens: np.ndarray) -> dict[str, int]:
    """Returns the counts i64[5] that are not 0, by the names of their sources."""
    return {source.name.lower(): int(tokens[source]) for source in Source if tokens[source]}


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The sample that a chunk belongs to, its expected length, and the policy that sets its draft budget."""

    group: GroupRef
    sample_index: int
    epoch: int
    expected_tokens: int  # of the whole answer
    class_starts: tuple[int, int]  # answer tokens from which it is of medium length, and long
    policy: Drafting
    way: DraftMode | None = None  # None: as the configuration of the draft model says
    method: str | None = None  # of EVIDENCE: by that part of the index; else a draft model's first, where there is one
    most_tokens: int | None = None  # maximum of the whole answer, or None if the sample ends with this chunk


@dataclass(slots=True)
class DraftReport:
    """How drafts went: tokens by `Source`, int64[5], and the number of verifications that accepted more than j tokens,
    int64[K].

    `tested`: verified draft tokens that were tested, see `policies.protocol.performance`. `model_tested`: those of a
    draft model, overtaken ones included; `model_accepted`: the right ones of these.
    """

    verifications: int
    drafted: np.ndarray
    accepted: np.ndarray
    accepted_at: np.ndarray
    model_tested: int = 0
    model_accepted: int = 0
    tested: int = 0

    @classmethod
    def none(cls, draft_tokens: int) -> "DraftReport":
        """Returns an empty report; no draft is longer than `draft_tokens`."""
        sources = np.zeros((2, len(Source)), np.int64)
        return cls(0, *sources, np.zeros(draft_tokens, np.int64))

    @classmethod
    def of(
        cls, verifications: int, drafted: bytearray, accepted: bytearray, counts: bytearray, draft_tokens: int
    ) -> "DraftReport":
        """Returns the report of many verifications. drafted, accepted: the sources of the tokens, a byte each; counts:
        accepted tokens, a byte for each draft.
        """
        by_source = (np.bincount(np.frombuffer(some, np.uint8), minlength=len(Source)) for some in (drafted, accepted))
        ended = np.bincount(np.frombuffer(counts, np.uint8), minlength=draft_tokens + 1)  # drafts by accepted tokens
        return cls(verifications, *by_source, len(counts) - np.cumsum(ended)[:draft_tokens])

    def add(self, other: "DraftReport") -> None:
        """Adds the report of another chunk of the same sample, whose drafts may have been longer."""
        self.verifications += other.verifications
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.model_tested += other.model_tested
        self.model_accepted += other.model_accepted
        self.tested += other.tested
        if len(other.accepted_at) > len(self.accepted_at):
            self.accepted_at = np.pad(self.accepted_at, (0, len(other.accepted_at) - len(self.accepted_at)))
        self.accepted_at[: len(other.accepted_at)] += other.accepted_at
