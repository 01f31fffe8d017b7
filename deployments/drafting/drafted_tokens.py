"""A chunk that drafts: its request inside vLLM, its draft under verification, and the results of earlier drafts.

Owned by `EngineDrafts`, on the engine's thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tailrace.deployments.draft_index.proposal import accepted_tokens
from tailrace.deployments.drafting.group_indexes import IndexedGroup
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import Source
from tailrace.deployments.messages.drafts import ON_DEVICE, DraftReport
from tailrace.policies.protocol.performance import count_tested


@dataclass(slots=True)
class DraftedTokens:
    """A chunk's drafts. Their results are stored as bytes and counted at its end: a step of 256 samples has as many
    results.
    """

    chunk: ChunkRequest
    request: object  # vLLM's scheduler-side Request
    group: IndexedGroup
    slot: int
    method: str  # method of its drafts without a draft model
    evidence: int  # the sources that these come from (`bits`)
    generated: int  # answer tokens so far
    until: int  # answer tokens at which the chunk ends
    verifications: int = 0
    tested: int = 0  # draft tokens that were tested, see `policies.protocol.performance`
    draft: list[int] = field(default_factory=list)  # in verification now, or verified in the step that has just ended
    sources: bytes = b""  # of `draft`, a byte (`Source`) for each token
    accepted: int = 0  # accepted tokens of `draft`
    unread: list[int] = field(default_factory=list)  # the last tokens, which its group's index does not have yet
    proposed: list[int] = field(default_factory=list)  # by vLLM's own drafter, for the step that verifies `draft`
    proposed_right: int = 0
    proposed_tested: int = 0
    futile: bool = False  # True if its last proposal cost more than it saved
    drafted_sources: bytearray = field(default_factory=bytearray)
    accepted_sources: bytearray = field(default_factory=bytearray)
    accepted_counts: bytearray = field(default_factory=bytearray)  # accepted tokens, of each verified draft

    def is_verified_next(self, draft: Sequence[int]) -> None:
        """Sets the draft of the step in flight: one of vLLM's own drafter, or none."""
        self.draft, self.sources = list(draft), bytes([Source.VLLM]) * len(draft)
        self.proposed = list(draft)

    def count(self, tokens: list[int]) -> int:
        """Counts the verification of `draft`, which has emitted these tokens. Returns how many of the draft's were
        right.
        """
        size = len(self.draft)
        if self.draft[0] == ON_DEVICE:
            accepted = min(size, len(tokens) - 1)
        else:
            accepted = size if tokens[:size] == self.draft else accepted_tokens(self.draft, tokens)
        self.accepted = accepted
        self.tested += count_tested(accepted, len(self.sources))
        self.drafted_sources += self.sources
        self.accepted_sources += self.sources[:accepted]
        self.accepted_counts.append(accepted)
        return accepted

    def report(self, draft_tokens: int, accepted: int = 0) -> DraftReport:
        """Returns the results so far; no draft is longer than `draft_tokens`. `accepted`: right tokens by the records.

        A draft on the device may have the chunk's last token: `count` took that for the model's own, which follows.
        """
        if self.draft[:1] == [ON_DEVICE] and accepted == len(self.accepted_sources) + 1:
            self.accepted_sources.append(self.sources[self.accepted])
            self.accepted_counts[-1] += 1
        parts = self.drafted_sources, self.accepted_sources, self.accepted_counts
        report = DraftReport.of(self.verifications, *parts, draft_tokens)
        report.tested = self.tested
        return report
