"""A run by the coordinator's journal: chunks that raced, and counts that results over HTTP do not carry.

Called by lab/verification/tokens.py.
"""

from collections import defaultdict

from tailrace.deployments.coordinator.journal import read_journal
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.events import ChunkFinished


class Journaled:
    """`text`: the journal of one run."""

    def __init__(self, text: str):
        entries = read_journal(text.splitlines()).entries
        self._ends = [entry for entry in entries if isinstance(entry, ChunkFinished)]
        actions = [action for entry in entries for action in getattr(entry, "actions", ())]
        self._starts = [action for action in actions if isinstance(action, StartChunk)]

    @property
    def races(self) -> int:
        """Returns the number of chunks that raced with another."""
        return sum(start.copy_of is not None for start in self._starts)

    def counts(self) -> dict:
        """Returns the figures of `summarise` that its results would give, if they had counts."""
        replicas = defaultdict(list)
        for start in self._starts:
            replicas[start.sample_id].append(start.replica_id)
        drafted = sum(end.drafted_tokens for end in self._ends)
        accepted = sum(end.accepted_tokens for end in self._ends)
        return {
            "chunked_share": round(sum(len(of) > 1 for of in replicas.values()) / max(1, len(replicas)), 4),
            "moved_samples": sum(len(set(of)) > 1 for of in replicas.values()),
            "drafted_tokens": drafted,
            "accepted_share": round(accepted / drafted, 4) if drafted else None,
        }
